"""Workspaces of unknown origin or of unusual names: nothing outside is changed, nothing waits."""

import os
import shutil
import sqlite3
import struct
from pathlib import Path

import pytest

from neural_mp.errors import HistoryError, RunInUseError
from neural_mp.reporting.page import write_page
from neural_mp.runs.history import History, get_storage_url
from neural_mp.runs.registry import open_storage

ABOUT = {"model": "a" * 12, "data": "b"}
MAGIC = bytes.fromhex("d9d505f920a163d7")


def begin(workspace, resume=False):
    return History(get_storage_url(workspace), ABOUT, higher_is_better=True, resume=resume)


def journal_naming(victim, pages):
    """Return a journal of SQLite's format that names a super-journal."""
    header = MAGIC + struct.pack(">IIIII", 0, 0, pages, 512, 4096)
    name = os.fsencode(victim)
    end = struct.pack(">II", len(name), sum(name) & 0xFFFFFFFF) + MAGIC
    return header.ljust(512, b"\0") + struct.pack(">I", 0x40000000 // 4096 + 1) + name + end


def test_a_journal_that_names_another_file_deletes_nothing(tmp_path):
    begin(tmp_path / "workspace").close()
    victim = tmp_path / "notes.txt"
    victim.write_text("mine")
    database = tmp_path / "workspace" / "history.db"
    content = journal_naming(victim, database.stat().st_size // 4096)
    (tmp_path / "workspace" / "history.db-journal").write_bytes(content)
    with pytest.raises(HistoryError, match="its journal 'history.db-journal' names another file"):
        begin(tmp_path / "workspace", resume=True)
    assert victim.read_text() == "mine"
    # SQLite itself follows the name: the journal of this test is one of its format.
    sqlite3.connect(database).execute("SELECT * FROM studies").fetchall()
    assert not victim.exists()


@pytest.mark.parametrize("name", ["history.db", "history.db-journal", "history.db-wal"])
def test_a_pipe_in_a_workspace_is_one_error(tmp_path, name):
    begin(tmp_path).close()
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(HistoryError, match="not a regular file, but a pipe"):
        begin(tmp_path)


def test_a_schema_of_very_many_tables_is_one_error(tmp_path):
    begin(tmp_path).close()
    with sqlite3.connect(tmp_path / "history.db") as connection:
        for number in range(1001):
            connection.execute(f"CREATE TABLE t{number} (x)")
    with pytest.raises(HistoryError, match="must have at most 1000 tables and indexes"):
        begin(tmp_path)


def test_tables_that_accept_no_run_are_one_error(tmp_path):
    """A new run ends in an error where Optuna calls every new study a duplicate."""
    begin(tmp_path).close()
    with sqlite3.connect(tmp_path / "history.db") as connection:
        connection.execute("DELETE FROM studies")
    with pytest.raises(HistoryError, match="a run cannot be created"):
        begin(tmp_path)


@pytest.mark.parametrize("name", ["a?b=c", "a%20b", "{x}", "a#b", "a\nb", os.fsdecode(b"\xff")])
def test_a_workspace_may_have_any_name(tmp_path, name):
    workspace = tmp_path / name
    begin(workspace).close()
    begin(workspace, resume=True).close()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert [path.name for path in workspace.iterdir()] == ["history.db"]
    assert open_storage(get_storage_url(workspace)).get_all_studies()


def test_a_copy_of_a_workspace_in_use_is_free(tmp_path):
    """A run in use can be resumed from a copy of its workspace, but not in its own."""
    with begin(tmp_path / "first"):
        shutil.copytree(tmp_path / "first", tmp_path / "copy")
        begin(tmp_path / "copy", resume=True).close()
        with pytest.raises(RunInUseError):
            begin(tmp_path / "first", resume=True)


def test_a_page_is_replaced_as_a_whole(tmp_path, monkeypatch):
    """A page whose writing is interrupted leaves the earlier one; a link is followed."""
    page, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(page)
    write_page(link, "<p>first</p>")
    assert link.is_symlink()
    assert page.read_text() == "<p>first</p>"

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_page(page, "<p>second</p>" * 1000)
    assert page.read_text() == "<p>first</p>"
    assert sorted(tmp_path.iterdir()) == [link, page]


def test_a_page_may_have_the_longest_name(tmp_path):
    write_page(tmp_path / ("x" * 250 + ".html"), "<p></p>")
    assert len(list(tmp_path.iterdir())) == 1
