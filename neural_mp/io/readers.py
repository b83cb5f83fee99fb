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
from typing import TypeVar

from neural_mp.errors import NeuralMPError
from neural_mp.io.files import read_plain
from neural_mp.io.yaml_reader import plain_yaml
from neural_mp.util.validators import InvalidValueError, Validator, located, string

T = TypeVar("T")

#: The most bytes of a file that are read, and that what was packed may come to.
LARGEST = 1 << 28
#: The most values that JSON may hold: one takes up to a hundred bytes of memory.
_MOST_VALUES = 10_000_000
#: What tells zlib that a gzip file comes.
_GZIP = 16 + zlib.MAX_WBITS


def read_yaml(path: str | Path, kind: Validator[T], error: type[NeuralMPError]) -> T:
    """What a YAML file holds.

    Args:
        path: the file.
        kind: of the document.
        error: what is raised.

    Raises:
        NeuralMPError: the file cannot be read, or is not of that kind; of the class `error`.
    """
    with reading(repr(str(path)), error):
        return kind(plain_yaml(_text(bytes_of(path))))


def read_json(
    path: str | Path, kind: Validator[T], error: type[NeuralMPError], hint: str = ""
) -> T:
    """What a JSON file holds; one that is packed with gzip or zlib is unpacked.

    Args:
        path: the file.
        kind: of the document.
        error: what is raised.
        hint: what to do then.

    Raises:
        NeuralMPError: the file cannot be read, or is not of that kind; of the class `error`.
    """
    with reading(repr(str(path)), error, hint):
        data = bytes_of(path)
        if data[:2] == b"\x1f\x8b":
            data = inflated(data, _GZIP)
        elif data[:1] == b"x":
            data = inflated(data)
        return kind(plain_json(data))


def of_json(data: object, kind: Validator[T], origin: str, error: type[NeuralMPError]) -> T:
    """What JSON holds that was kept elsewhere than in a file; also packed by `packed`.

    Args:
        data: JSON as text, or what `packed` made of it.
        kind: of the document.
        origin: what the message calls it.
        error: what is raised.

    Raises:
        NeuralMPError: it is not of that kind; of the class `error`.
    """
    with reading(origin, error):
        words = string(data)
        # What is packed starts with the header of zlib, which is a letter in this alphabet.
        return kind(plain_json(words if words[:1] in '{["' else unpacked(words)))


def packed(data: bytes) -> str:
    """Bytes as text that is short: graphs repeat themselves."""
    return base64.b85encode(zlib.compress(data)).decode()


def unpacked(words: str) -> bytes:
    """Read back what `packed` wrote.

    Raises:
        InvalidValueError: it was not written so, or comes to too much.
    """
    try:
        return inflated(base64.b85decode(words))
    except ValueError as error:
        raise InvalidValueError(f"it is damaged: {error}") from None


@contextmanager
def reading(origin: str, error: type[NeuralMPError], hint: str = "") -> Iterator[None]:
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


def bytes_of(path: str | Path) -> bytes:
    """The content of a file.

    Raises:
        InvalidValueError: it cannot be read, or is too large.
    """
    try:
        return read_plain(path, LARGEST)
    except (OSError, ValueError) as error:  # the latter of names that hold a NUL
        words = getattr(error, "strerror", None) or error
        raise InvalidValueError(f"it cannot be read: {words}") from None


def inflated(data: bytes, form: int = zlib.MAX_WBITS) -> bytes:
    """Unpack bytes, but no more than may come of a file of ours.

    Args:
        data: what `zlib` packed.
        form: its `wbits`.

    Raises:
        InvalidValueError: it was damaged or cut off, or comes to too much.
    """
    unpacking = zlib.decompressobj(form)
    try:
        found = unpacking.decompress(data, LARGEST)
    except zlib.error as error:
        raise InvalidValueError(f"it is damaged: {error}") from None
    if unpacking.unconsumed_tail:
        raise InvalidValueError(f"it comes to more than {LARGEST >> 20} MiB when it is unpacked")
    if not unpacking.eof:
        raise InvalidValueError("it is damaged: its end is missing")
    return found


def plain_json(data: bytes | str) -> object:
    """What JSON holds.

    Raises:
        InvalidValueError: it is no JSON, or holds too much.
    """
    words = _text(data) if isinstance(data, bytes) else data
    if sum(map(words.count, ",[{")) > _MOST_VALUES:
        raise InvalidValueError(f"it holds more than {_MOST_VALUES} values")
    try:
        found: object = json.loads(words)
    except ValueError as error:
        raise InvalidValueError(f"it is damaged, and no JSON: {error}") from None
    return found


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValueError(
            f"it cannot be read: it is not UTF-8 at byte {error.start}"
        ) from None
