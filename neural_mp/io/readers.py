"""Bounded, validated readers of the files of this package: plans, saved models, run records.

Files may come from an untrusted source: the decompressed size, the nesting and the content are
checked. All mistakes raise one error class, chosen by the caller.
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
from neural_mp.io.limits import (
    MAX_COMPRESSION_RATIO,
    MAX_DATA_BYTES,
    MAX_DATA_VALUES,
    MAX_FILE_BYTES,
    MAX_VALUES,
)
from neural_mp.io.yaml_reader import load_yaml
from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    anything,
    format_located_error,
    string,
)

T = TypeVar("T")

_TOO_DEEP = "nesting exceeds Python's recursion limit"

#: Argument of zlib that detects gzip or zlib automatically.
_GZIP_OR_ZLIB = 32 + zlib.MAX_WBITS
#: First bytes of gzip and zlib files; no JSON starts with these.
_COMPRESSED_STARTS = (b"\x1f\x8b", b"x")


class JsonError(InvalidValueError, ValueError):
    """Text that is not valid JSON."""


def read_yaml(path: str | Path, kind: Validator[T], error: type[NeuralMPError]) -> T:
    """Return the content of a YAML file, validated by `kind`.

    Raises:
        NeuralMPError: of class `error`, if the file is unreadable or invalid.
    """
    with prefix_file_errors(repr(str(path)), error):
        return kind(load_yaml(_decode_text(read_file_bytes(path))))


def read_json(
    path: str | Path,
    kind: Validator[T],
    error: type[NeuralMPError],
    hint: str = "",
    max_bytes: int = MAX_FILE_BYTES,
    max_values: int = MAX_VALUES,
) -> T:
    """Return the content of a JSON file, possibly compressed (gzip, zlib), validated by `kind`.

    Raises:
        NeuralMPError: of class `error`, if the file is unreadable or invalid; the message ends with
            `hint`.
    """
    with prefix_file_errors(repr(str(path)), error, hint):
        data = read_file_bytes(path, max_bytes)
        if data.startswith(_COMPRESSED_STARTS):
            data = decompress_bounded(data, max_bytes)
        return kind(load_json(data, max_values))


def read_data_json(path: Path) -> Any:
    """Return the content of a data set's JSON file, with the higher limits for data.

    Raises:
        DataError: the file is unreadable or not JSON.
    """
    return read_json(
        path, anything, DataError, max_bytes=MAX_DATA_BYTES, max_values=MAX_DATA_VALUES
    )


def parse_json(data: object, kind: Validator[T], origin: str, error: type[NeuralMPError]) -> T:
    """Return the content of a JSON text, possibly from `compress_text`, validated by `kind`.

    Raises:
        NeuralMPError: of class `error`, if the text is invalid; the message starts with `origin`.
    """
    with prefix_file_errors(origin, error):
        text = string(data)
        # Compressed text starts with the zlib header, a letter in base85.
        return kind(load_json(text if text[:1] in '{["' else decompress_text(text)))


def compress_text(data: bytes) -> str:
    """Compress bytes to text; graphs are repetitive."""
    return base64.b85encode(zlib.compress(data)).decode()


def decompress_text(text: str) -> bytes:
    """Reverse `compress_text`.

    Raises:
        InvalidValueError: the text is malformed or too large when decompressed.
    """
    try:
        return decompress_bounded(base64.b85decode(text))
    except ValueError as error:
        raise InvalidValueError(f"damaged compressed data: {error}") from None


@contextmanager
def prefix_file_errors(origin: str, error: type[NeuralMPError], hint: str = "") -> Iterator[None]:
    """Prefix errors raised in this context with the origin (a file) and the key path.

    Raises:
        NeuralMPError: the error raised inside, as class `error`; the message ends with `hint`.
    """
    try:
        yield
    except RecursionError:
        raise error(f"{origin}: {_TOO_DEEP}{hint and f'; {hint}'}") from None
    except NeuralMPError as cause:
        raise error(f"{origin}: {format_located_error(cause)}{hint and f'; {hint}'}") from cause


def read_file_bytes(path: str | Path, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a file.

    Raises:
        InvalidValueError: the file is unreadable or too large.
    """
    try:
        return read_bounded(path, max_bytes)
    except (OSError, ValueError) as error:  # ValueError: the name contains a NUL
        problem = getattr(error, "strerror", None) or error
        raise InvalidValueError(f"cannot be read: {problem}") from None


def decompress_bounded(data: bytes, max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Decompress zlib data, or all members of gzip data.

    Raises:
        InvalidValueError: the data are damaged, truncated or too large, at most or for their
            compressed size.
    """
    max_bytes = min(max_bytes, max(MAX_FILE_BYTES, MAX_COMPRESSION_RATIO * len(data)))
    content = decompress_start(data, max_bytes + 1)
    if len(content) > max_bytes:
        raise InvalidValueError(f"decompressed size exceeds the limit of {max_bytes >> 20} MiB")
    return content


def decompress_start(data: bytes, length: int) -> bytes:
    """Return the first bytes of decompressed zlib or gzip data: `length`, or all if fewer.

    Raises:
        InvalidValueError: the data are damaged, or truncated before `length`.
    """
    content = b""
    while data:
        member = zlib.decompressobj(_GZIP_OR_ZLIB)
        try:
            content += member.decompress(data, length - len(content))
        except zlib.error as error:
            raise InvalidValueError(f"damaged compressed data: {error}") from None
        if len(content) >= length:
            break
        if not member.eof:
            raise InvalidValueError("damaged compressed data: truncated")
        data = member.unused_data
    return content


def load_json(data: bytes | str, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON.

    Raises:
        JsonError: the text is not JSON, has too many values, or is nested too deeply.
    """
    text = _decode_text(data) if isinstance(data, bytes) else data
    if sum(map(text.count, ",[{")) > max_values:
        raise JsonError(f"the number of values exceeds the limit of {max_values}")
    try:
        return json.loads(text)
    except ValueError as error:
        raise JsonError(f"cannot be read as JSON: {error}") from None
    except RecursionError:
        raise JsonError(_TOO_DEEP) from None


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise JsonError(f"cannot be read: not UTF-8 at byte {error.start}") from None
