"""Archives with members that lead elsewhere, in every kind of file that is an archive."""

from __future__ import annotations

import functools
import io
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from attacks.formats.scratch import encoder_config, written
from attacks.hostile import Attacks

ZIP_MEMBERS = Attacks("zip members")

_LINK, _DEVICE = 0o120777 << 16, 0o020666 << 16
#: Bytes of a member's header before its name.
_HEADER_BYTES = 30


def _named(name: str, content: bytes = b"ran", mode: int = 0) -> tuple[zipfile.ZipInfo, bytes]:
    info = zipfile.ZipInfo("x")
    info.filename = name  # the constructor cuts names
    info.external_attr = mode
    return info, content


def _members(canary: Path) -> dict[str, tuple[zipfile.ZipInfo, bytes]]:
    """Return what is added to an archive: name of the attack → member."""
    return {
        "../x": _named(f"../../../../../../../..{canary}"),
        "../ within a folder": _named(f"assets/../../../../../../../../..{canary}"),
        "an absolute name": _named(str(canary)),
        "an absolute name behind slashes": _named(f"//{canary}"),
        "backslashes": _named("..\\..\\ran"),
        "a drive": _named("C:/ran"),
        "..": _named(".."),
        "a folder that leads out": _named("assets/../../", b""),
        "a link to a file": _named("assets/link", b"/etc/hostname", _LINK),
        "a link to a folder": _named("assets", str(canary.parent).encode(), _LINK),
        "a link that leads out": _named("assets/link", b"../../../etc/hostname", _LINK),
        "a device": _named("assets/zero", b"", _DEVICE),
        "a NUL in the name": _named(f"assets/a\0/../../{canary}"),
        "a line break in the name": _named("assets/a\n[red]b"),
    }


#: Members that read no other file and are on no path, but are not what an archive holds.
_MAY_BE_READ = frozenset({"a device"})


@functools.cache
def _keras_file() -> bytes:
    import keras

    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    return written("net.keras", net.save)


@functools.cache
def _program() -> bytes:
    import torch
    from attacks.hostile_archives import real_file

    del torch
    return written("net.pt2", lambda path: real_file(path.parent))


@functools.cache
def _pickled_weights() -> bytes:
    import torch

    state = _encoder().state_dict()
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


@functools.cache
def _encoder() -> Any:
    import transformers

    return transformers.BertModel(encoder_config()).eval()


@functools.cache
def _arrays() -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, inputs=np.ones((4, 2), np.float32), labels=np.zeros(4))
    return buffer.getvalue()


def _read_keras(folder: Path, data: bytes) -> None:
    from neural_mp.api.loading import load_source

    (folder / "net.keras").write_bytes(data)
    load_source(str(folder / "net.keras"), None, None)


def _read_program(folder: Path, data: bytes) -> None:
    import torch

    from neural_mp.adaptors.registry import adaptor_for

    path = folder / "net.pt2"
    path.write_bytes(data)
    adaptor = adaptor_for(str(path))
    adaptor.predict(adaptor.load(str(path)), torch.ones(4, 4))


def _read_folder(folder: Path, data: bytes) -> None:
    from neural_mp.adaptors.pytorch.decoders.transformers_folder import read_folder

    encoder_config().save_pretrained(folder / "bert")
    (folder / "bert" / "pytorch_model.bin").write_bytes(data)
    read_folder(folder / "bert")


def _read_arrays(folder: Path, data: bytes) -> None:
    from neural_mp.data import build_dataset

    (folder / "x.npz").write_bytes(data)
    dataset = build_dataset({"numpy": {"path": str(folder / "x.npz")}})
    assert len(dataset) == 4


Reader = Callable[[Path, bytes], None]
_Member = tuple[zipfile.ZipInfo, bytes]
_KINDS: dict[str, tuple[Callable[[], bytes], Reader]] = {
    "a .keras file": (_keras_file, _read_keras),
    "a .pt2 file": (_program, _read_program),
    "pickled weights": (_pickled_weights, _read_folder),
    "an .npz file": (_arrays, _read_arrays),
}


def _rewritten(data: bytes, change: Callable[[list[_Member]], list[_Member]]) -> bytes:
    """Return an archive of other members, made from those of an archive."""
    target = io.BytesIO()
    with (
        warnings.catch_warnings(),
        zipfile.ZipFile(io.BytesIO(data)) as old,
        zipfile.ZipFile(target, "w") as new,
    ):
        warnings.simplefilter("ignore")  # of duplicates
        for info, content in change([(info, old.read(info)) for info in old.infolist()]):
            new.writestr(info, content)
    return target.getvalue()


def _copied(data: bytes, changed: Callable[[zipfile.ZipInfo], None]) -> bytes:
    """Return an archive whose entries are changed, with the same contents."""

    def copy_members(members: list[_Member]) -> list[_Member]:
        copies = [(zipfile.ZipInfo(info.filename), content) for info, content in members]
        for info, _ in copies:
            changed(info)
        return copies

    return _rewritten(data, copy_members)


def _with(data: bytes, *members: _Member, first: bool = False) -> bytes:
    """Return an archive with more members, behind the others or before them."""
    return _rewritten(data, lambda old: [*members, *old] if first else [*old, *members])


def _names(data: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return archive.namelist()


def _overlapping(data: bytes) -> bytes:
    """Return an archive whose directory has its last entry a thousand times."""
    end = data.rfind(b"PK\x05\x06")
    count, size, start = struct.unpack("<HII", data[end + 10 : end + 20])
    entry = data.rfind(b"PK\x01\x02", start, end)
    copies = b"".join(data[entry:end].replace(b"x", bytes([97 + n % 26])) for n in range(1000))
    tail = struct.pack("<HHII", count + 1000, count + 1000, size + len(copies), start)
    return data[:end] + copies + data[end : end + 8] + tail + data[end + 20 :]


def _renamed_in_place(data: bytes) -> bytes:
    """Return an archive in which members have other names at their places than in the directory."""
    changed = bytearray(data)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name = info.header_offset + _HEADER_BYTES
            changed[name : name + 3] = b"../"
    return bytes(changed)


def _said_size(data: bytes, size: int) -> bytes:
    entry = data.rfind(b"PK\x01\x02")
    return data[: entry + 24] + struct.pack("<I", size) + data[entry + 28 :]


#: Change of an archive → how it is made, and whether it must be refused.
_CHANGES: dict[str, tuple[Callable[[bytes, Path], bytes], bool]] = {
    "a member twice": (
        lambda data, canary: _with(data, _named(_names(data)[-1], b"other")),
        True,
    ),
    "a member twice, the other one first": (
        lambda data, canary: _with(data, _named(_names(data)[-1], b"other"), first=True),
        True,
    ),
    "all members as links": (
        lambda data, canary: _copied(data, lambda info: setattr(info, "external_attr", _LINK)),
        True,
    ),
    "all members in ..": (
        lambda data, canary: _copied(
            data, lambda info: setattr(info, "filename", f"../{info.filename}")
        ),
        True,
    ),
    "entries that overlap": (lambda data, canary: _overlapping(data), True),
    "other names at their places": (lambda data, canary: _renamed_in_place(data), True),
    "a size of 4 GB": (lambda data, canary: _said_size(data, 2**32 - 2), True),
    "no size": (lambda data, canary: _said_size(data, 0), True),
    "no directory": (lambda data, canary: data[: data.rfind(b"PK\x01\x02")], True),
    "a second archive behind": (lambda data, canary: data + data, False),
    "a comment of 64 kB": (lambda data, canary: _commented(data), False),
    "nothing else": (lambda data, canary: data, False),
}


def _commented(data: bytes) -> bytes:
    buffer = io.BytesIO(data)
    with zipfile.ZipFile(buffer, "a") as archive:
        archive.comment = b"PK\x05\x06" * 16_000
    return buffer.getvalue()


def _plant_members(kind: str) -> Callable[[Path, Path, str], None]:
    make, read = _KINDS[kind]

    def play(folder: Path, canary: Path, member: str) -> None:
        before = _listed(folder.parent)
        read(folder, _with(make(), _members(canary)[member]))
        assert _listed(folder.parent) == before, "it wrote outside of its folder"

    return play


def _plant_changes(kind: str) -> Callable[[Path, Path, str], None]:
    make, read = _KINDS[kind]

    def play(folder: Path, canary: Path, change: str) -> None:
        read(folder, _CHANGES[change][0](make(), canary))

    return play


def _listed(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _cases() -> Iterator[tuple[str, list[str], bool | None, Callable[..., None]]]:
    names = list(_members(Path("x")))
    for kind in _KINDS:
        # numpy reads members by name and writes none.
        strict = None if kind == "an .npz file" else True
        yield kind, [n for n in names if n not in _MAY_BE_READ], strict, _plant_members(kind)
        yield kind, [n for n in names if n in _MAY_BE_READ], None, _plant_members(kind)
        refused = [n for n, (_, harmful) in _CHANGES.items() if harmful]
        yield kind, refused, strict, _plant_changes(kind)
        yield kind, [n for n in _CHANGES if n not in refused], None, _plant_changes(kind)
        yield kind, ["nothing else"], False, _plant_changes(kind)


for _kind, _values, _refused, _play in _cases():
    ZIP_MEMBERS.here(f"{_kind} with", *_values, refused=_refused)(_play)

FAMILY = ZIP_MEMBERS.as_family()
