"""What is measured is kept for later runs, and found by them only where all is the same."""

import logging
import os
import zlib

import pytest

from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.runs import measurement_cache
from neural_mp.runs.measurement_cache import NOTHING_KNOWN, Known
from neural_mp.util.validators import anything


@pytest.fixture
def kept(tmp_path):
    return Known(tmp_path / "known", {"model": "m", "cpu": "c"})


def test_what_is_kept_is_found_for_the_same_data_only(kept):
    kept.keep("baseline", "data 1", {"accuracy": 0.5})
    kept.keep("baseline", "data 2", {"accuracy": 0.25})
    assert kept.recall("baseline", anything, lambda: "data 1") == {"accuracy": 0.5}
    assert kept.recall("baseline", anything, lambda: "data 2") == {"accuracy": 0.25}
    assert kept.recall("baseline", anything, lambda: "data 3") is None
    assert kept.recall("baseline", anything, lambda: None) is None
    assert kept.recall("times", anything, lambda: "data 1") is None


@pytest.mark.parametrize("changed", [{"model": "n"}, {"cpu": "d"}, {"metric": "f1"}])
def test_nothing_is_found_where_anything_is_different(kept, changed):
    kept.keep("baseline", "data", 1)
    assert kept.of(**changed).recall("baseline", anything, lambda: "data") is None


def test_the_data_are_only_read_where_something_is_known(kept):
    def read():
        raise AssertionError("reading all data takes long")

    assert kept.recall("baseline", anything, read) is None
    assert NOTHING_KNOWN.recall("baseline", anything, read) is None


def test_nothing_is_kept_of_what_cannot_be_told(kept):
    kept.keep("baseline", None, 1)
    unknown = kept.of(metric=None)
    unknown.keep("baseline", "data", 1)
    assert unknown.recall("baseline", anything, lambda: "data") is None
    assert not kept.folder.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no json"),
        zlib.compress(b"[]"),
        zlib.compress(b'{"about": {}, "found": 3}'),
        zlib.compress(b'{"about": {}, "found": [["data", 7]]}'),
        zlib.compress(b" " * (MAX_FILE_BYTES + 1)),
    ],
)
def test_a_damaged_file_is_as_none(kept, content):
    kept.keep("baseline", "data", 1)
    (file,) = kept.folder.iterdir()
    file.write_bytes(content)
    assert kept.recall("baseline", anything, lambda: "data") is None
    kept.keep("baseline", "data", 2)
    assert kept.recall("baseline", anything, lambda: "data") == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "known").write_text("a file")
    with caplog.at_level(logging.WARNING, "neural_mp"):
        Known(tmp_path / "known", {}).keep("baseline", "data", 1)
    assert "what was measured is not kept for later runs" in caplog.text


def test_what_was_not_used_for_longest_goes_first(kept, monkeypatch):
    monkeypatch.setattr(measurement_cache, "_FILES", 2)
    kept.keep("a", "data", 1)
    kept.keep("b", "data", 2)
    for file in kept.folder.iterdir():
        os.utime(file, (1, 1))  # long ago
    assert kept.recall("a", anything, lambda: "data") == 1
    kept.keep("c", "data", 3)
    found = {what: kept.recall(what, anything, lambda: "data") for what in "abc"}
    assert found == {"a": 1, "b": None, "c": 3}
