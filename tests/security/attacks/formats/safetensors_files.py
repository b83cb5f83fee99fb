"""Files of safetensors whose headers lie, as weights of a folder and of a saved result."""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.formats.scratch import encoder_config, written
from attacks.hostile import Attacks

from neural_mp.adaptors.pytorch.decoders.transformers_folder import read_folder, read_weights
from neural_mp.errors import ModelLoadError

SAFETENSORS = Attacks("safetensors")

_FILE = "model.safetensors"
Header = dict[str, Any]
#: Changes the header, and returns the text of the file's header and the bytes behind.
Change = Callable[[Header, bytes], tuple[str | bytes, bytes]]


@functools.cache
def _right() -> bytes:
    import transformers

    net = transformers.BertModel(encoder_config())
    return written(_FILE, lambda path: net.save_pretrained(path.parent))


def _parsed() -> tuple[Header, bytes]:
    data = _right()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def _entry(change: Callable[[Header, Header], None]) -> Change:
    """Change the first tensor's entry; the change is given the second one's, too."""

    def changed(header: Header, content: bytes) -> tuple[str, bytes]:
        first, second = [entry for name, entry in header.items() if name != "__metadata__"][:2]
        change(first, second)
        return json.dumps(header), content

    return changed


def _set(**values: Any) -> Change:
    return _entry(lambda first, second: first.update(values))


def _text(change: Callable[[str], str | bytes]) -> Change:
    return lambda header, content: (change(json.dumps(header)), content)


def _added(name: str, entry: Any) -> Change:
    def changed(header: Header, content: bytes) -> tuple[str, bytes]:
        header[name] = entry(len(content)) if callable(entry) else entry
        return json.dumps(header), content

    return changed


def _overlap(first: Header, second: Header) -> None:
    first["data_offsets"] = list(second["data_offsets"])
    first["shape"], first["dtype"] = second["shape"], second["dtype"]


def _repeated(header: Header, content: bytes) -> tuple[str, bytes]:
    name, entry = next((n, e) for n, e in header.items() if n != "__metadata__")
    text = json.dumps(header)
    return f"{text[:-1]}, {json.dumps(name)}: {json.dumps(entry)}}}", content


def _all_on_one(header: Header, content: bytes) -> tuple[str, bytes]:
    """Let all tensors of a shape take the same bytes."""
    places: dict[str, list[int]] = {}
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = places.setdefault(str(entry["shape"]), entry["data_offsets"])
    return json.dumps(header), content


_MANY = {f"t{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(300_000)}
_END = 2**62
_CHANGES: dict[str, Change] = {
    "two tensors in one place": _entry(_overlap),
    "all tensors in one place": _all_on_one,
    "a tensor over half of another": _entry(
        lambda first, second: first.update(
            data_offsets=[second["data_offsets"][0] + 4, second["data_offsets"][1] + 4]
        )
    ),
    "a tensor over all others": _added(
        "all", lambda size: {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    ),
    "an end beyond the file": _set(data_offsets=[0, 2**40]),
    "a start beyond the file": _set(data_offsets=[2**40, 2**40 + 64]),
    "an end of 2^63": _set(data_offsets=[0, 2**63]),
    "an end of 2^64": _set(data_offsets=[0, 2**64]),
    "a negative start": _set(data_offsets=[-64, 0]),
    "an end before the start": _set(data_offsets=[64, 0]),
    "offsets that are no integers": _set(data_offsets=[0.5, "64"]),
    "offsets that are one number": _set(data_offsets=64),
    "three offsets": _set(data_offsets=[0, 64, 128]),
    "no offsets": _entry(lambda first, second: first.pop("data_offsets")),
    "an offset of 400 digits": _set(data_offsets=[0, 10**400]),
    "an endless offset": _text(
        lambda text: text.replace('"data_offsets": [0,', '"data_offsets": [1e999,')
    ),
    "a size of 2^62": _set(shape=[2**62]),
    "sizes whose product overflows": _set(shape=[2**33, 2**33]),
    "sizes whose product overflows to the right one": _set(shape=[2**32, 2**32, 1]),
    "a negative size": _set(shape=[-4, -4]),
    "a size of zero": _set(shape=[0]),
    "a thousand axes": _set(shape=[1] * 1000),
    "a shape that is a text": _set(shape="16"),
    "a type that does not exist": _set(dtype="F33"),
    "a type of the wrong size": _set(dtype="F64"),
    "a type that is a list": _set(dtype=["F32"]),
    "a type of half a byte": _set(dtype="F4"),
    "a tensor given twice": _repeated,
    "more tensors than the model has": _added(
        "x", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ),
    "300,000 tensors without values": lambda header, content: (
        json.dumps({**header, **_MANY}),
        content,
    ),
    "a name of a megabyte": _added(
        "x" * 2**20, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ),
    "a name with control characters": _added(
        "\x1b[2J\n../../x", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    ),
    "notes that are nested": _added("__metadata__", {"format": {"pt": [1]}}),
    "notes that are a tensor": _added("__metadata__", {"dtype": "F32", "shape": [1]}),
    "notes of another framework": _added("__metadata__", {"format": "os.system"}),
    "no notes": lambda header, content: (
        json.dumps({n: e for n, e in header.items() if n != "__metadata__"}),
        content,
    ),
    "an entry that is a list": _added("x", [1]),
    "an entry that is nothing": _added("x", None),
    "a header that is a list": lambda header, content: ("[]", content),
    "a header that is empty": lambda header, content: ("", content),
    "a header without tensors": lambda header, content: ("{}", content),
    "a header nested 100,000 deep": lambda header, content: (
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        content,
    ),
    "a header of spaces": lambda header, content: (" " * 2**26, content),
    "a header that is cut off": _text(lambda text: text[:-20]),
    "a header with NaN": _text(lambda text: text.replace("[0,", "[NaN,")),
    "a header that is not UTF-8": _text(lambda text: text.encode()[:-1] + b"\xff}"),
    "a header that begins with a mark of order": _text(lambda text: "\ufeff" + text),
    "more behind the tensors": lambda header, content: (json.dumps(header), content + bytes(64)),
    "a hole between the tensors": lambda header, content: (
        json.dumps(_moved(header, 64)),
        bytes(64) + content,
    ),
    "fewer bytes than tensors": lambda header, content: (json.dumps(header), content[:-64]),
    "no bytes": lambda header, content: (json.dumps(header), b""),
}
#: Changes after which the weights of the model are all there.
_HARMLESS = (
    "more tensors than the model has",
    "300,000 tensors without values",
    "a name of a megabyte",
    "a name with control characters",
    "a header that begins with a mark of order",
    "notes of another framework",
    "no notes",
    "a tensor given twice",
    "a size of zero",
)


def _moved(header: Header, offset: int) -> Header:
    for name, entry in header.items():
        if name != "__metadata__":
            entry["data_offsets"] = [end + offset for end in entry["data_offsets"]]
    return header


def _spoilt(path: Path, change: str) -> None:
    text, content = _CHANGES[change](*_parsed())
    data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    path.write_bytes(struct.pack("<Q", len(data)) + data + content)


def _is_folder(folder: Path, canary: Path, change: str) -> None:
    encoder_config().save_pretrained(folder)
    _spoilt(folder / _FILE, change)
    read_folder(folder)


def _is_shard(folder: Path, canary: Path, change: str) -> None:
    """Read the same as one of the weights of a saved result."""
    _spoilt(folder / _FILE, change)
    read_weights(folder / _FILE)


for _kind, _play in {"a folder with": _is_folder, "saved weights with": _is_shard}.items():
    _hostile = [name for name in _CHANGES if name not in _HARMLESS]
    SAFETENSORS.here(_kind, *_hostile)(_play)
    SAFETENSORS.here(_kind, *_HARMLESS, refused=None)(_play)


_LENGTHS = (0, 1, 2**26, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64 - 8, 2**64 - 1)


@SAFETENSORS.here("a folder with a header of a length of", *_LENGTHS)
def _has_length(folder: Path, canary: Path, length: int) -> None:
    encoder_config().save_pretrained(folder)
    (folder / _FILE).write_bytes(struct.pack("<Q", length) + _right()[8:])
    read_folder(folder)


_INDEXES: dict[str, Any] = {
    "that leads out": {"weight_map": {"a": "../outside.safetensors"}},
    "of an absolute name": {"weight_map": {"a": "/etc/hostname"}},
    "of a missing file": {"weight_map": {"a": "model-00001-of-00001.safetensors"}},
    "of no files": {"weight_map": {}},
    "of numbers": {"weight_map": {"a": 1}},
    "that is a list": [],
    "that is a list inside": {"weight_map": ["model.safetensors"]},
    "of itself": {"weight_map": {"a": f"{_FILE}.index.json"}},
    "of a name with NUL": {"weight_map": {"a": "a\0.safetensors"}},
    "of ..": {"weight_map": {"a": ".."}},
}


@SAFETENSORS.here("a folder with an index", *_INDEXES)
def _has_index(folder: Path, canary: Path, kind: str) -> None:
    encoder_config().save_pretrained(folder)
    (folder.parent / "outside.safetensors").write_bytes(_right())
    (folder / "other.safetensors").write_bytes(_right())
    (folder / f"{_FILE}.index.json").write_text(json.dumps(_INDEXES[kind]))
    read_folder(folder)


@SAFETENSORS.here("saved weights with an index", *_INDEXES)
def _has_saved_index(folder: Path, canary: Path, kind: str) -> None:
    (folder.parent / "outside.safetensors").write_bytes(_right())
    (folder / f"{_FILE}.index.json").write_text(json.dumps(_INDEXES[kind]))
    if not read_weights(folder / _FILE):
        raise ModelLoadError("it has no weights")  # as loading a result says


@SAFETENSORS.here("a folder with nothing changed", refused=False)
def _is_right(folder: Path, canary: Path) -> None:
    encoder_config().save_pretrained(folder)
    (folder / _FILE).write_bytes(_right())
    read_folder(folder)


FAMILY = SAFETENSORS.as_family()
