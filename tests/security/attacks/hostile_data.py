"""Data that run code, open other programs, or take more memory than there is."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from attacks.hostile import Attacks

from neural_mp.api.input_data import read_file_batches
from neural_mp.api.optimized_model import load
from neural_mp.data import build_dataset
from neural_mp.runs.record_schema import read_record_file

DATA = Attacks()


class _Touches:
    """Pickled, it makes the canary when it is read."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (str(self._canary), "w")


def _array(header: str, content: bytes = b"", version: int = 1) -> bytes:
    """A file of numpy with this header."""
    text = header.encode()
    size = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + size + text + content


def _described(shape: str, kind: str = "'<f4'") -> str:
    return f"{{'descr': {kind}, 'fortran_order': False, 'shape': {shape}, }}"


def _arrays(canary: Path) -> dict[str, bytes]:
    objects = io.BytesIO()
    hostile = np.empty(1, object)
    hostile[0] = _Touches(canary)
    np.save(objects, hostile, allow_pickle=True)
    fields = "[('x', '<f4'), ('y', '|O')]"
    return {
        "pickled objects": objects.getvalue(),
        "a pickle": pickle.dumps(_Touches(canary)),
        "pickled objects in a field": _array(_described("(1,)", fields), bytes(100)),
        "a terabyte that is not there": _array(_described("(1000000, 262144)"), bytes(64)),
        "more than can be counted": _array(_described("(2**62, 2**62)".replace("2**62", "9" * 30))),
        "a negative size": _array(_described("(-1, 4)"), bytes(64)),
        "a size of another kind": _array(_described("('x',)"), bytes(64)),
        "a header in brackets": _array("(" * 9_000 + ")" * 900),
        "a header that calls": _array(f"open({str(canary)!r}, 'w')"),
        "a header of a gigabyte": _array("{" + " " * 2**20, version=2),
        "a header of signs": _array("-" * 9_000 + "1"),
        "a type in types": _array(_described("(1,)", "[" * 80 + "'f4'" + "]" * 80), bytes(64)),
        "a name of another version": b"\x93NUMPY\x09\x00" + bytes(100),
        "nothing": b"",
    }


_KINDS = tuple(_arrays(Path("x")))


@DATA.here("an array of", *_KINDS)
def _is_an_array(folder: Path, canary: Path, kind: str) -> None:
    (folder / "x.npy").write_bytes(_arrays(canary)[kind])
    build_dataset({"numpy": {"inputs": str(folder / "x.npy")}})


@DATA.here("an archive of", *_KINDS)
def _is_an_archive(folder: Path, canary: Path, kind: str) -> None:
    with zipfile.ZipFile(folder / "x.npz", "w") as archive:
        archive.writestr("inputs.npy", _arrays(canary)[kind])
    build_dataset({"numpy": {"path": str(folder / "x.npz"), "labels_key": None}})


@DATA.here("what is compared on, an array of", *_KINDS[:4])
def _is_compared(folder: Path, canary: Path, kind: str) -> None:
    (folder / "x.npy").write_bytes(_arrays(canary)[kind])
    read_file_batches(folder / "x.npy", None, 2)


@DATA.here("an archive that holds", "a bomb of five parts")
def _holds_bombs(folder: Path, canary: Path, what: str) -> None:
    """Each part is of half a gibibyte, which a single array may have."""
    path, names = folder / "x.npz", ["inputs", *"abcd"]
    part = _array(_described("(512, 1048576)", "'|u1'"))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            archive.writestr(f"{name}.npy", part)
    data, size = bytearray(path.read_bytes()), struct.pack("<I", (1 << 29) + len(part))
    for sign, place in (b"PK\x03\x04", 22), (b"PK\x01\x02", 24):
        begin = data.find(sign)
        while begin >= 0:
            data[begin + place : begin + place + 4] = size
            begin = data.find(sign, begin + 1)
    path.write_bytes(bytes(data))
    build_dataset({"numpy": {"path": str(path), "labels_key": None}})


@DATA.here("an archive that is", "a bomb", "locked", "cut off", "packed in another way")
def _is_an_odd_archive(folder: Path, canary: Path, what: str) -> None:
    path = folder / "x.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", _array(_described("(4,)"), bytes(16)))
    data = bytearray(path.read_bytes())
    offsets = [data.find(b"PK\x03\x04") + 6, data.find(b"PK\x01\x02") + 8]
    if what == "locked":
        for offset in offsets:
            data[offset] |= 1
    elif what == "a bomb":
        for offset in offsets:
            data[offset + 16 : offset + 20] = struct.pack("<I", 2**31)
    elif what == "packed in another way":
        for offset in offsets:
            data[offset + 2] = 99
    elif what == "cut off":
        del data[40:60]
    path.write_bytes(bytes(data))
    build_dataset({"numpy": {"path": str(path), "labels_key": None}})


def _png(width: int, height: int, content: bytes = b"") -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + checksum

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", content or zlib.compress(bytes(1000)))
    return b"\x89PNG\r\n\x1a\n" + body + chunk(b"IEND", b"")


def _images(canary: Path) -> dict[str, bytes]:
    postscript = (
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
        f"({canary}) (w) file closefile showpage\n%%EOF\n"
    )
    return {
        "PostScript": postscript.encode(),
        "a hundred million pixels": _png(10_000, 10_000),
        "a billion pixels": _png(2**15, 2**15),
        "more pixels than can be": _png(2**31 - 1, 2**31 - 1),
        "a picture that is cut off": _png(64, 64)[:60],
        "a picture of noise": b"\x89PNG\r\n\x1a\n" + bytes(range(256)) * 8,
        "a GIF of nothing": b"GIF89a" + bytes(4),
        "a TIFF that points to itself": b"II*\x00\x08\x00\x00\x00"
        + b"\x01\x00"
        + bytes(12)
        + b"\x08",
        "a PDF": b"%PDF-1.4\n1 0 obj\n<< >>\nendobj\n",
        "vector commands": b"\xd7\xcd\xc6\x9a" + bytes(64),
    }


@DATA.here("an image of", *_images(Path("x")))
def _is_an_image(folder: Path, canary: Path, kind: str) -> None:
    (folder / "images" / "cat").mkdir(parents=True)
    (folder / "images" / "cat" / "1.png").write_bytes(_images(canary)[kind])
    dataset = build_dataset({"ImageFolder": {"root": str(folder / "images")}})
    dataset[0]


_TABLES = {
    "a field of a megabyte": "a,b\n" + "1" * 2**20 + ",0\n",
    "quotes without end": 'a,b\n"' + "1,2\n" * 50_000,
    "a number of many digits": "a,b\n" + "9" * 5_000 + ",0\n",
    "text that is none": "a,b\n\udcff,0\n",
}


@DATA.here("a table with", *_TABLES)
def _is_a_table(folder: Path, canary: Path, what: str) -> None:
    (folder / "t.csv").write_text(_TABLES[what], encoding="utf-8", errors="surrogateescape")
    build_dataset({"csv": {"path": str(folder / "t.csv")}})


@DATA.here("a table with a label of many digits", refused=False)
def _has_a_label(folder: Path, canary: Path) -> None:
    (folder / "t.csv").write_text("a,b\n1," + "9" * 40 + "\n")
    build_dataset({"csv": {"path": str(folder / "t.csv")}})


_NESTED = "[" * 200_000


@DATA.here("annotations of COCO that", "are nested", "hold numbers without end", "are a list")
def _is_coco(folder: Path, canary: Path, what: str) -> None:
    from neural_mp.data.annotations import read_annotations

    texts = {
        "are nested": f'{{"images": {_NESTED}',
        "hold numbers without end": '{"categories": [{"id": 1e999, "name": "x"}]}',
        "are a list": "[1, 2]",
    }
    (folder / "x.json").write_text(texts[what])
    read_annotations(folder / "x.json")


@DATA.here("a record of TensorFlow's that is said to hold", 2**36, 2**62, 2**64 - 5)
def _is_a_record(folder: Path, canary: Path, length: int) -> None:
    from neural_mp.compat.inc.components import load_vocabulary

    head = struct.pack("<Q", length)
    path = folder / "x.tfrecord"
    path.write_bytes(head + struct.pack("<I", _checksum(head)) + bytes(100))
    kinds = load_vocabulary("tensorflow").datasets
    list(kinds.build("TFRecordDataset", {"root": str(path)}))


def _checksum(data: bytes) -> int:
    """The masked CRC-32C of a record."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@DATA.here("digits of MNIST that are a bomb")
def _is_mnist(folder: Path, canary: Path) -> None:
    from neural_mp.compat.inc.components.mnist import read_idx

    packed = gzip.compress(bytes(2**26))
    (folder / "x.gz").write_bytes(gzip.compress(bytes([0, 0, 8, 3])) + packed * 17)
    read_idx(folder / "x.gz", 3)


@DATA.here("pictures of CIFAR as a pickle")
def _is_cifar(folder: Path, canary: Path) -> None:
    from neural_mp.compat.inc.components import load_vocabulary

    (folder / "test_batch").write_bytes(pickle.dumps(_Touches(canary)))
    load_vocabulary("tensorflow").datasets.build("CIFAR10", {"root": str(folder)})


@DATA.here("the list of files of a result that is", "nested", "one of other files")
def _is_a_result(folder: Path, canary: Path, what: str) -> None:
    from neural_mp.api.saved_model import MANIFEST

    files = {"files": {"../../etc/passwd": "x"}, "neural_mp": 1, "framework": "os", "report": {}}
    (folder / MANIFEST).write_text(_NESTED if what == "nested" else json.dumps(files))
    load(folder)


@DATA.here("the record of a run that is", "nested", "a bomb", "a pickle")
def _is_a_run(folder: Path, canary: Path, what: str) -> None:
    path = folder / "x.json.gz"
    if what == "a bomb":
        path.write_bytes(gzip.compress(bytes(2**26)) * 5)
    else:
        text = _NESTED.encode() if what == "nested" else pickle.dumps(_Touches(canary))
        path.write_bytes(gzip.compress(text))
    read_record_file(path)
