"""Small files that would fill the memory are refused; honest ones of any ratio are read."""

from __future__ import annotations

import gzip
import io
import json
import zipfile

import numpy as np
import pytest
from numpy.lib import format as npy

from neural_mp.data import build_dataset
from neural_mp.errors import DataError, ModelLoadError
from neural_mp.io import archives, readers
from neural_mp.io.archives import open_checked_archive
from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.io.readers import decompress_bounded
from neural_mp.util.system import memory
from neural_mp.util.validators import InvalidValueError

MIB = 1 << 20


@pytest.fixture
def small_limits(monkeypatch):
    """The limits of a gibibyte as a mebibyte, which is quick to write."""
    monkeypatch.setattr(archives, "RATIO_EXEMPT_ARRAY_BYTES", MIB)


def read(path, **options):
    return build_dataset({"numpy": {"path": str(path), "labels_key": None, **options}})


def zeros(count, each=MIB // 2 + 100):
    return {f"a{number}": np.zeros(each, np.uint8) for number in range(count)}


def write_zeros(path, names, mebibytes):
    """Write arrays of zeros, a mebibyte at a time."""
    head, piece = io.BytesIO(), bytes(MIB)
    shape = (mebibytes, MIB)
    npy.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in names:
            with archive.open(f"{name}.npy", "w") as member:
                member.write(head.getvalue())
                for _ in range(mebibytes):
                    member.write(piece)


def test_five_quarters_of_a_gibibyte_of_zeros_are_one_error(tmp_path):
    path = tmp_path / "bomb.npz"
    write_zeros(path, ["inputs", *"abcd"], 256)
    assert path.stat().st_size < 16 * MIB
    with pytest.raises(DataError, match=r"bomb\.npz .*arrays of 1280 MiB are compressed"):
        read(path)


def test_the_limit_is_that_of_all_arrays_of_a_file(tmp_path, small_limits):
    path = tmp_path / "masks.npz"
    np.savez_compressed(path, inputs=np.zeros((2, MIB // 4), np.uint8))
    assert len(read(path)) == 2
    np.savez_compressed(path, inputs=np.zeros((2, 8), np.uint8), **zeros(3))
    with pytest.raises(DataError, match=r"up to 1 MiB: store others uncompressed, by numpy.savez"):
        read(path)
    np.savez(path, inputs=np.zeros((2, 8), np.uint8), **zeros(3))
    assert len(read(path)) == 2


def test_numbers_are_read_whatever_their_size(tmp_path, small_limits):
    """Random floats, and masks of a tenth, are compressed far less than zeros."""
    draw = np.random.default_rng(0)
    masks = (draw.random((8, 256, 1024)) < 0.1).astype(np.uint8)
    for inputs in (draw.normal(size=(8, 1024, 64)).astype(np.float32), masks):
        np.savez_compressed(tmp_path / "data.npz", inputs=inputs)
        np.testing.assert_array_equal(read(tmp_path / "data.npz").inputs, inputs)


def test_an_array_larger_than_the_free_memory_is_one_error(tmp_path, monkeypatch):
    inputs = np.random.default_rng(0).random((4, MIB // 8), np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.zeros(4, int))
    np.save(tmp_path / "data.npy", inputs)
    monkeypatch.setattr(memory, "free_memory", lambda: MIB)
    message = (
        r"data\.npz .*array 'inputs' requires 2 MiB of memory, and 1 MiB are free; store .*\.npy"
    )
    with pytest.raises(DataError, match=message):
        read(tmp_path / "data.npz")
    assert len(read(tmp_path / "data.npz", inputs_key="labels")) == 4  # which are small
    mapped = build_dataset({"numpy": {"inputs": str(tmp_path / "data.npy")}})
    assert len(mapped) == 4


def test_many_members_below_the_limit_of_one_are_refused_together(small_limits):
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as archive:
        for number in range(3):
            archive.writestr(str(number), bytes(MIB // 2))
    with (
        pytest.raises(ModelLoadError, match="limit 1048576 bytes, got 1572864 bytes"),
        open_checked_archive(written),
    ):
        pass


def test_compressed_data_of_an_absurd_ratio_are_refused_and_others_read(monkeypatch):
    annotations = json.dumps([{"id": n, "box": [n, n * 7 % 640, 3, 4]} for n in range(50_000)])
    packed, bomb = gzip.compress(annotations.encode()), gzip.compress(bytes(4 * MIB))
    monkeypatch.setattr(readers, "MAX_FILE_BYTES", MIB)
    assert MAX_FILE_BYTES > MIB
    assert decompress_bounded(packed, 1 << 32) == annotations.encode()
    with pytest.raises(InvalidValueError, match="decompressed size exceeds the limit of 1 MiB"):
        decompress_bounded(bomb, 1 << 32)


@pytest.mark.parametrize(
    ("name", "dataset"),
    [
        ("table.csv", {"csv": {"path": "table.csv"}}),
        ("text.txt", {"text": {"path": "text.txt", "tokenizer": "."}}),
        ("tokens.npy", {"text": {"path": "tokens.npy"}}),
    ],
)
def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path, monkeypatch, name, dataset):
    """A tebibyte that takes no place on the disk, and would be one line of a table."""
    monkeypatch.chdir(tmp_path)
    with (tmp_path / name).open("wb") as file:
        if name.endswith(".npy"):
            kind = {"descr": "<i8", "fortran_order": False, "shape": (1 << 37,)}
            npy.write_array_header_1_0(file, kind)
        file.truncate((1 << 40) + 128)
    (tmp_path / "tokenizer.json").write_text(_TOKENIZER)
    with pytest.raises(DataError, match=r"requires 1048576 MiB of memory, and \d+ MiB are free"):
        build_dataset(dataset)


_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)
