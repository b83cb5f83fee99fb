"""Checks of untrusted `.xml` files before OpenVINO reads them."""

from __future__ import annotations

import math
from pathlib import Path
from xml.parsers import expat

from neural_mp.errors import ModelLoadError
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.io.limits import MAX_FILE_BYTES, MAX_TENSOR_AXES

#: Bits of the element types that constants of a file may have.
_BITS = {
    **dict.fromkeys(("f64", "i64", "u64"), 64),
    **dict.fromkeys(("f32", "i32", "u32"), 32),
    **dict.fromkeys(("f16", "bf16", "i16", "u16"), 16),
    **dict.fromkeys(("i8", "u8", "boolean", "f8e4m3", "f8e5m2", "f8e8m0"), 8),
    **dict.fromkeys(("i4", "u4", "nf4", "f4e2m1"), 4),
    "u6": 6,
    "u3": 3,
    **dict.fromkeys(("u2", "i2"), 2),
    **dict.fromkeys(("u1", "bin"), 1),
}
#: Axes of OpenVINO's own ops; extension ops come from libraries, which are never loaded.
_OPSET = "opset"


def weights_file(path: Path) -> Path:
    """Return the file with the weights of an `.xml` file."""
    return path.with_suffix(".bin")


def check_xml(path: Path) -> None:
    """Check that a file declares no entities and that its constants lie within the weights.

    Raises:
        ModelLoadError: the file is missing, malformed or refers outside of its weights.
    """
    weights = weights_file(path)
    try:
        text = read_bounded(path, MAX_FILE_BYTES)
        require_regular_file(weights)
        size = weights.stat().st_size if weights.exists() else 0
    except OSError as error:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {error}") from error
    _Checks(path, size).run(text)


class _Checks:
    """The checks of one file.

    Args:
        path: the file, named in errors.
        size: the size of its weights in bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size, self._depth = path, size, 0
        self._layer = ""

    def run(self, text: bytes) -> None:
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = self._reject_doctype
        parser.EntityDeclHandler = self._reject_doctype
        parser.StartElementHandler = self._enter_element
        parser.EndElementHandler = self._leave_element
        try:
            parser.Parse(text, True)
        except expat.ExpatError as error:
            raise self._error(f"is not valid XML: {error}") from None

    def _error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{str(self._path)!r} {what}")

    def _reject_doctype(self, *_: object) -> None:
        raise self._error("declares a document type or entities, which model files never do")

    def _leave_element(self, _: str) -> None:
        self._depth -= 1

    def _enter_element(self, tag: str, attributes: dict[str, str]) -> None:
        self._depth += 1
        if self._depth == 1 and tag != "net":
            raise self._error(f"must hold a 'net', got {tag!r}; give the .xml file of OpenVINO")
        if tag == "layer":
            self._layer = attributes.get("name", "")
            version = attributes.get("version", "opset1")
            if not version.startswith(_OPSET):
                raise self._error(
                    f"holds the op {self._layer!r} of {version!r}, which is none of OpenVINO's own "
                    f"and needs a library; libraries are never loaded from files"
                )
        elif tag == "data" and "offset" in attributes and "size" in attributes:
            self._check_constant(attributes)

    def _check_constant(self, attributes: dict[str, str]) -> None:
        try:
            offset, size = (int(attributes[key]) for key in ("offset", "size"))
            shape = [int(part) for part in attributes.get("shape", "").split(",") if part.strip()]
        except ValueError:
            raise self._error(f"has a malformed constant in {self._layer!r}") from None
        if min(offset, size, *shape, 0) < 0 or offset + size > self._size:
            raise self._error(
                f"reads bytes {offset} to {offset + size} for {self._layer!r}, but its weights "
                f"have {self._size} bytes; copy the .bin file that belongs to it"
            )
        kind = attributes.get("element_type", "")
        if kind == "string":
            return
        if kind not in _BITS or len(shape) > MAX_TENSOR_AXES:
            raise self._error(f"has a constant of unknown type {kind!r} in {self._layer!r}")
        if math.prod(shape) * _BITS[kind] > 8 * size:
            raise self._error(
                f"has a constant of shape {shape} and type {kind} in {self._layer!r}, but only "
                f"{size} bytes for it"
            )
