"""Storage of models in folders and single files, and checks of untrusted `.xml` files."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

import numpy as np

from neural_mp.adaptors.common.named_graphs.graph_model import collect_graph_details
from neural_mp.adaptors.common.named_graphs.model_metadata import (
    CONVERTED,
    LATER,
    read_details,
    restore_example_inputs,
    write_details,
)
from neural_mp.adaptors.common.signatures.signature import Signature
from neural_mp.adaptors.openvino.graph.edit import get_op_type, name_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role
from neural_mp.adaptors.openvino.runtime import get_core, ov
from neural_mp.errors import ModelLoadError, one_line
from neural_mp.io.files import read_bounded, require_regular_file
from neural_mp.io.limits import MAX_FILE_BYTES, MAX_TENSOR_AXES
from neural_mp.util.validators import MOST_STREAMS, boolean, integer_between, optional, record

MODEL_FILE, DETAILS_FILE = "model.xml", "neural_mp_openvino.json"


def save_model(model: OpenVinoModel, folder: Path) -> None:
    """Write the model and its metadata."""
    save_file(model, folder / MODEL_FILE, {})
    write_details(folder / DETAILS_FILE, {**collect_graph_details(model), "streams": model.streams})


def restore_model(folder: Path) -> OpenVinoModel:
    """Read back the files of `save_model`.

    Raises:
        ModelLoadError: the files are missing, truncated or tampered with.
    """
    signature, details = read_details(folder / DETAILS_FILE, _parse_details)
    path = folder / MODEL_FILE
    check_xml(path)
    try:
        program = get_core().read_model(path)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{str(path)!r} is damaged: {one_line(error)}") from error
    _check_ports(program, signature, path)
    return OpenVinoModel(
        program,
        signature,
        restore_example_inputs(signature, details),
        None if details["converted"] else program,
        details["ops"],
        details.get("results", {}),
        counts=details["counts"],
        streams=details.get("streams"),
    )


def _parse_details(value: object) -> tuple[Signature, dict[str, Any]]:
    return Signature.from_dict(value), _DETAILS(value)


_STREAMS = {"streams": optional(integer_between(1, MOST_STREAMS))}
_DETAILS = record({**CONVERTED, "converted": boolean}, {**LATER, **_STREAMS})


def _check_ports(program: ov.Model, signature: Signature, path: Path) -> None:
    names = {name_of(port.get_node()) for port in (*program.inputs, *program.outputs)}
    missing = [
        port.tensor for port in (*signature.inputs, *signature.outputs) if port.tensor not in names
    ]
    if missing:
        raise ModelLoadError(f"{str(path)!r} lacks {missing[0]!r}, which {DETAILS_FILE} names")


def save_file(model: OpenVinoModel, path: Path, metadata: Mapping[str, str]) -> None:
    """Write the model alone, as `.xml` and `.bin`; existing files stay until both are complete."""
    program = model.active_graph
    if metadata:
        program = program.clone()
        for key, value in metadata.items():
            program.set_rt_info(value, ["neural_mp", key])
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        complete = Path(scratch) / path.name
        ov.save_model(program, complete, compress_to_fp16=False)
        find_weights_file(complete).replace(find_weights_file(path))
        complete.replace(path)


def dump_graph(model: OpenVinoModel, path: Path) -> tuple[Path, ...]:
    """Write the model; its `.xml` is text."""
    file = path.with_suffix(".xml")
    save_file(model, file, {})
    return find_weights_file(file), file


def program_digest(program: ov.Model) -> str:
    """Return a digest of all nodes and weights."""
    running = hashlib.sha256()
    constants: dict[str, str] = {}
    for node in sorted(program.get_ops(), key=name_of):
        if has_role(node, Role.CONSTANT):
            continue
        inputs = [
            _identify_graph_output(port.get_source_output(), constants) for port in node.inputs()
        ]
        attributes = sorted((key, str(value)) for key, value in node.get_attributes().items())
        running.update(repr((name_of(node), get_op_type(node), attributes, inputs)).encode())
    return running.hexdigest()


def _identify_graph_output(output: ov.Output, constants: dict[str, str]) -> tuple[str, int]:
    """Return the name of a computed result, or the digest of a constant, whose name may vary."""
    node = output.get_node()
    if not has_role(node, Role.CONSTANT):
        return name_of(node), output.get_index()
    name = name_of(node)
    if name not in constants:
        kind = f"{node.get_element_type()} {list(node.get_output_shape(0))}"
        content = np.ascontiguousarray(node.get_data()).view(np.uint8)
        constants[name] = hashlib.sha256(kind.encode() + content.tobytes()).hexdigest()
    return constants[name], 0


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
#: Start of the versions of OpenVINO's own ops; extension ops come from libraries, never loaded.
_OPSET = "opset"


def find_weights_file(path: Path) -> Path:
    """Return the file with the weights of an `.xml` file."""
    return path.with_suffix(".bin")


def check_xml(path: Path) -> None:
    """Check that a file declares no entities and that its constants lie within the weights.

    Raises:
        ModelLoadError: the file is missing, malformed or refers outside of its weights.
    """
    weights = find_weights_file(path)
    try:
        text = read_bounded(path, MAX_FILE_BYTES)
        require_regular_file(weights)
        size = weights.stat().st_size if weights.exists() else 0
    except OSError as error:
        raise ModelLoadError(f"{str(path)!r} cannot be read: {error}") from error
    _Checks(path, size).check_text(text)


class _Checks:
    """The checks of one file, with weights of `size` bytes."""

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._size, self._at_root, self._layer = path, size, True, ""

    def check_text(self, text: bytes) -> None:
        parser = expat.ParserCreate()
        parser.StartDoctypeDeclHandler = self._reject_doctype
        parser.EntityDeclHandler = self._reject_doctype
        parser.StartElementHandler = self._enter_element
        try:
            parser.Parse(text, True)
        except expat.ExpatError as error:
            raise self._load_error(f"is not valid XML: {error}") from None

    def _load_error(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{str(self._path)!r} {what}")

    def _reject_doctype(self, *_: object) -> None:
        raise self._load_error("declares a document type or entities, which model files never do")

    def _enter_element(self, tag: str, attributes: dict[str, str]) -> None:
        if self._at_root and tag != "net":
            raise self._load_error(
                f"must hold a 'net', got {tag!r}; give the .xml file of OpenVINO"
            )
        self._at_root = False
        if tag == "layer":
            self._layer = attributes.get("name", "")
            version = attributes.get("version", "opset1")
            if not version.startswith(_OPSET):
                raise self._load_error(
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
            raise self._load_error(f"has a malformed constant in {self._layer!r}") from None
        if min(offset, size, *shape, 0) < 0 or offset + size > self._size:
            raise self._load_error(
                f"reads bytes {offset} to {offset + size} for {self._layer!r}, but its weights "
                f"have {self._size} bytes; copy the .bin file that belongs to it"
            )
        kind = attributes.get("element_type", "")
        if kind == "string":
            return
        if kind not in _BITS or len(shape) > MAX_TENSOR_AXES:
            raise self._load_error(f"has a constant of unknown type {kind!r} in {self._layer!r}")
        if math.prod(shape) * _BITS[kind] > 8 * size:
            raise self._load_error(
                f"has a constant of shape {shape} and type {kind} in {self._layer!r}, but only "
                f"{size} bytes for it"
            )
