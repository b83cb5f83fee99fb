"""Measurements are cached for later runs, and found only under equal conditions."""

import logging
import os
import zlib

import pytest

from neural_mp.errors import HistoryError
from neural_mp.io import measurement_cache
from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.io.measurement_cache import NO_CACHE, FileCache, RunCache
from neural_mp.util.validators import anything, number, optional


@pytest.fixture
def kept(tmp_path):
    return FileCache(tmp_path / "cache", {"model": "m", "cpu": "c"})


def found_in(cache, key, data):
    """Return the entry under a key for these data; None if there is none."""
    digest = data if callable(data) else lambda: data
    looked, value = cache.scope_to(data=digest).get_entry(key, anything)
    assert looked is (value is not None)
    return value


def test_what_is_kept_is_found_for_the_same_data_only(kept):
    kept.scope_to(data="data 1").put_entry("baseline", {"accuracy": 0.5})
    kept.scope_to(data="data 2").put_entry("baseline", {"accuracy": 0.25})
    assert found_in(kept, "baseline", "data 1") == {"accuracy": 0.5}
    assert found_in(kept, "baseline", "data 2") == {"accuracy": 0.25}
    assert found_in(kept, "baseline", "data 3") is None
    assert found_in(kept, "baseline", None) is None
    assert found_in(kept, "times", "data 1") is None


@pytest.mark.parametrize("changed", [{"model": "n"}, {"cpu": "d"}, {"metric": "f1"}])
def test_nothing_is_found_where_anything_is_different(kept, changed):
    kept.scope_to(data="data").put_entry("baseline", 1)
    assert found_in(kept.scope_to(**changed), "baseline", "data") is None


def test_the_data_are_only_read_where_something_is_known(kept):
    def read():
        raise AssertionError("reading all data takes long")

    assert found_in(kept, "baseline", read) is None
    assert found_in(NO_CACHE, "baseline", read) is None


def test_nothing_is_kept_of_what_cannot_be_told(kept):
    kept.scope_to(data=None).put_entry("baseline", 1)
    unknown = kept.scope_to(metric=None)
    unknown.scope_to(data="data").put_entry("baseline", 1)
    assert found_in(unknown, "baseline", "data") is None
    assert not kept.folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no zlib",
        zlib.compress(b"no json"),
        zlib.compress(b"[]"),
        zlib.compress(b'{"scope": {}, "entries": 3}'),
        zlib.compress(b'{"scope": {}, "entries": [["data", 7]]}'),
        MAX_FILE_BYTES + 1,
    ],
)
def test_a_damaged_file_is_as_none(kept, content):
    kept.scope_to(data="data").put_entry("baseline", 1)
    (file,) = kept.folder.iterdir()
    spaces = zlib.compress(b" " * content, level=1) if isinstance(content, int) else content
    file.write_bytes(spaces)
    assert found_in(kept, "baseline", "data") is None
    kept.scope_to(data="data").put_entry("baseline", 2)
    assert found_in(kept, "baseline", "data") == 2


def test_a_folder_that_cannot_be_written_costs_a_warning(tmp_path, caplog):
    (tmp_path / "cache").write_text("a file")
    with caplog.at_level(logging.WARNING, "neural_mp"):
        FileCache(tmp_path / "cache", {}).scope_to(data="data").put_entry("baseline", 1)
    assert "cannot be written to" in caplog.text


def test_what_was_not_used_for_longest_goes_first(kept, monkeypatch):
    monkeypatch.setattr(measurement_cache, "_MAX_FILES", 2)
    kept.scope_to(data="data").put_entry("a", 1)
    kept.scope_to(data="data").put_entry("b", 2)
    for file in kept.folder.iterdir():
        os.utime(file, (1, 1))  # long ago
    assert found_in(kept, "a", "data") == 1
    kept.scope_to(data="data").put_entry("c", 3)
    entries = {key: found_in(kept, key, "data") for key in "abc"}
    assert entries == {"a": 1, "b": None, "c": 3}


def test_what_is_not_of_its_kind_is_as_nothing(kept):
    kept.put_entry("times", {"conv": 1})
    assert kept.get_entry("times", number) == (False, None)
    assert kept.get_entry("times", anything) == (True, {"conv": 1})


def test_a_run_keeps_that_it_looked_and_found_nothing_whatever_the_conditions():
    stored = []
    cache = RunCache({"noise": 0.5}, lambda *pair: stored.append(pair), "run 1")
    cache.scope_to(data=None, metric=None).put_entry("times", None)
    assert cache.get_entry("times", optional(number)) == (True, None)
    assert cache.get_entry("noise", number) == (True, 0.5)
    assert cache.get_entry("latencies", number) == (False, None)
    assert stored == [("times", None)]
    cache.put_entry("noise", "much")
    with pytest.raises(HistoryError, match="run 1: noise"):
        cache.get_entry("noise", number)
