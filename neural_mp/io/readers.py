"""Files that we wrote, read back: bounded in size, checked against a kind, with one error.

All that is read from a file of ours comes through here: plans, saved models, records of runs. Who
wrote it last is not known, so nothing is taken on trust: not how large it is once it is unpacked,
nor how deep it is nested, nor what stands in it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.errors import DataError, NeuralMPError
from neural_mp.io.files import read_bounded
from neural_mp.io.limits import MAX_DATA_BYTES, MAX_DATA_VALUES, MAX_FILE_BYTES, MAX_VALUES
from neural_mp.io.yaml_reader import load_yaml
from neural_mp.util.validators import InvalidValueError, Validator, anything, located, string

T = TypeVar("T")

#: Makes zlib find out by itself whether a file of gzip or of zlib comes.
_EITHER = 32 + zlib.MAX_WBITS
#: What files of gzip and of zlib begin with; no JSON does.
_PACKED = (b"\x1f\x8b", b"x")


class JsonError(InvalidValueError, ValueError):
    """Text that cannot be read as JSON."""


def read_yaml(path: str | Path, kind: Validator[T], error: type[NeuralMPError]) -> T:
    """What a YAML file holds.

    Args:
        path: the file.
        kind: of the document.
        error: what is raised.

    Raises:
        NeuralMPError: the file cannot be read, or is not of that kind; of the class `error`.
    """
    with file_context(repr(str(path)), error):
        return kind(load_yaml(_text(bytes_of(path))))


def read_json(
    path: str | Path,
    kind: Validator[T],
    error: type[NeuralMPError],
    hint: str = "",
    max_bytes: int = MAX_FILE_BYTES,
    max_values: int = MAX_VALUES,
) -> T:
    """What a JSON file holds; one that is packed with gzip or zlib is unpacked.

    Args:
        path: the file.
        kind: of the document.
        error: what is raised.
        hint: what to do then.
        max_bytes: how many it may hold.
        max_values: how many it may hold.

    Raises:
        NeuralMPError: the file cannot be read, or is not of that kind; of the class `error`.
    """
    with file_context(repr(str(path)), error, hint):
        data = bytes_of(path, max_bytes)
        if data.startswith(_PACKED):
            data = decompress_bounded(data, max_bytes)
        return kind(load_json(data, max_values))


def read_data_json(path: Path) -> Any:
    """What a JSON file of a data set holds, which may be as large as its owner made it.

    Raises:
        DataError: the file cannot be read, or is no JSON.
    """
    return read_json(
        path, anything, DataError, max_bytes=MAX_DATA_BYTES, max_values=MAX_DATA_VALUES
    )


def parse_json(data: object, kind: Validator[T], origin: str, error: type[NeuralMPError]) -> T:
    """What JSON holds that was kept elsewhere than in a file; also packed by `packed`.

    Args:
        data: JSON as text, or what `packed` made of it.
        kind: of the document.
        origin: what the message calls it.
        error: what is raised.

    Raises:
        NeuralMPError: it is not of that kind; of the class `error`.
    """
    with file_context(origin, error):
        words = string(data)
        # What is packed starts with the header of zlib, which is a letter in this alphabet.
        return kind(load_json(words if words[:1] in '{["' else decompress_text(words)))


def compress_text(data: bytes) -> str:
    """Bytes as text that is short: graphs repeat themselves."""
    return base64.b85encode(zlib.compress(data)).decode()


def decompress_text(words: str) -> bytes:
    """Read back what `packed` wrote.

    Raises:
        InvalidValueError: it was not written so, or comes to too much.
    """
    try:
        return decompress_bounded(base64.b85decode(words))
    except ValueError as error:
        raise InvalidValueError(f"it is damaged: {error}") from None


@contextmanager
def file_context(origin: str, error: type[NeuralMPError], hint: str = "") -> Iterator[None]:
    """Say in every error raised inside which file, and which key in it, it comes from.

    Args:
        origin: the file.
        error: what is raised.
        hint: what to do then.

    Raises:
        NeuralMPError: what was raised inside, of the class `error`.
    """
    try:
        yield
    except RecursionError:
        raise error(f"{origin}: it is nested too deeply to be read{hint and f'; {hint}'}") from None
    except NeuralMPError as found:
        raise error(f"{origin}: {located(found)}{hint and f'; {hint}'}") from found


def bytes_of(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """The content of a file.

    Raises:
        InvalidValueError: it cannot be read, or is too large.
    """
    try:
        return read_bounded(path, max_bytes)
    except (OSError, ValueError) as error:  # the latter of names that hold a NUL
        words = getattr(error, "strerror", None) or error
        raise InvalidValueError(f"it cannot be read: {words}") from None


def decompress_bounded(data: bytes, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Unpack bytes of zlib, or all parts of those of gzip.

    Raises:
        UnfitError: they are damaged or cut off, or come to too much.
    """
    found = b""
    while data:
        unpacking = zlib.decompressobj(_EITHER)
        try:
            found += unpacking.decompress(data, max_bytes + 1 - len(found))
        except zlib.error as error:
            raise InvalidValueError(f"it is damaged: {error}") from None
        if len(found) > max_bytes:
            raise InvalidValueError(
                f"it comes to more than {max_bytes >> 20} MiB when it is unpacked"
            )
        if not unpacking.eof:
            raise InvalidValueError("it is damaged: its end is missing")
        data = unpacking.unused_data
    return found


def load_json(data: bytes | str, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON.

    Raises:
        JsonError: it is no JSON, holds too much, or is nested too deeply.
    """
    words = _text(data) if isinstance(data, bytes) else data
    if sum(map(words.count, ",[{")) > max_values:
        raise JsonError(f"it holds more than {max_values} values")
    try:
        return json.loads(words)
    except ValueError as error:
        raise JsonError(f"it cannot be read as JSON: {error}") from None
    except RecursionError:
        raise JsonError("it is nested too deeply to be read") from None


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"it cannot be read: it is not UTF-8 at byte {error.start}") from None
