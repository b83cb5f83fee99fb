"""Folders replaced as a whole: kills lose nothing, and files of others are never touched."""

import json
import os
from pathlib import Path

import pytest

from neural_mp.io.staged_folder import (
    STAGED,
    digest_of_file,
    finish_replacement,
    replace_files,
    scratch_folder,
)

MANIFEST = "manifest.json"
#: Calls of the file system that change folders.
CHANGES = ("rename", "replace", "unlink", "mkdir")


def read_digests(folder):
    return json.loads((folder / MANIFEST).read_text())["files"]


def version(folder, files):
    """Write files with their manifest, and return the folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    digests = {name: digest_of_file(folder / name) for name in files}
    (folder / MANIFEST).write_text(json.dumps({"files": digests}))
    return folder


def contents(folder):
    """Return the text of the files of a version, which must match its manifest."""
    digests = read_digests(folder)
    assert {name: digest_of_file(folder / name) for name in digests} == digests
    return {name: (folder / name).read_text() for name in digests}


OLD = {"model": "old", "plan": "same", "weights/a": "old a", "weights/b": "old b"}
NEW = {"model": "new", "plan": "same", "weights/b": "new b", "tokens/c": "new c"}


def folder_outside(tmp_path):
    """Return a folder with a file of somebody else, to which links lead."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "a").write_text("precious")
    return folder


def replace_and_die(complete, target, survived):
    """Replace files in a child process that ends before change number `survived` + 1.

    Returns:
        Whether the child ended before the replacement was complete.
    """
    child = os.fork()
    if child == 0:
        left = [survived]

        def counted(call):
            def change(*arguments, **options):
                if left[0] == 0:
                    os._exit(9)
                left[0] -= 1
                return call(*arguments, **options)

            return change

        for name in CHANGES:
            setattr(Path, name, counted(getattr(Path, name)))
        replace_files(complete, target, MANIFEST, read_digests)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_a_kill_at_any_change_leaves_the_earlier_or_the_new_version(tmp_path):
    kills = []
    for survived in range(100):
        target = version(tmp_path / f"target{survived}", OLD)
        (target / "notes.txt").write_text("mine")
        complete = version(tmp_path / f"complete{survived}", NEW)
        was_killed = replace_and_die(complete, target, survived)
        assert finish_replacement(target, MANIFEST, read_digests) is None
        kills.append(contents(target))
        assert (target / "notes.txt").read_text() == "mine"
        assert not (target / STAGED).exists()
        again = version(tmp_path / f"again{survived}", OLD)
        assert replace_files(again, target, MANIFEST, read_digests) is None
        assert contents(target) == OLD
        assert not (target / "tokens/c").exists()
        if not was_killed:
            break
    assert kills[0] == OLD
    assert kills[1:] == [NEW] * (len(kills) - 1)
    assert len(kills) > 6


def test_files_behind_links_and_changed_files_are_never_replaced(tmp_path):
    outside = folder_outside(tmp_path)
    linked = version(tmp_path / "linked", {"model": "old"})
    (linked / "weights").symlink_to(outside)
    (linked / MANIFEST).write_text(
        json.dumps({"files": {"weights/a": digest_of_file(outside / "a")}})
    )
    changed = version(tmp_path / "changed", {"model": "old", "notes.txt": "theirs"})
    (changed / "notes.txt").write_text("mine")
    for target, files, bar in (
        (linked, {"other": "new"}, None),
        (linked, {"weights/a": "new"}, "weights/a"),
        (changed, {"notes.txt": "new"}, "notes.txt"),
        (changed, {"other": "new"}, None),
    ):
        complete = version(tmp_path / f"complete {target.name} {bar}", files)
        assert replace_files(complete, target, MANIFEST, read_digests) == bar
        assert (outside / "a").read_text() == "precious"
        assert (changed / "notes.txt").read_text() == "mine"


def test_a_staged_version_that_leads_outside_is_not_moved(tmp_path):
    outside = folder_outside(tmp_path)
    target = version(tmp_path / "target", {"model": "old"})
    (target / "weights").symlink_to(outside)
    version(target / STAGED, {"weights/a": "hostile"})
    assert finish_replacement(target, MANIFEST, read_digests) == "weights/a"
    assert (outside / "a").read_text() == "precious"
    elsewhere = version(tmp_path / "elsewhere", {"model": "old"})
    (elsewhere / STAGED).symlink_to(version(tmp_path / "hostile", {"model": "hostile"}))
    assert finish_replacement(elsewhere, MANIFEST, read_digests) is None
    assert contents(elsewhere) == {"model": "old"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
def test_scratch_folders_of_ended_processes_are_removed(tmp_path):
    child = os.fork()
    if child == 0:
        with scratch_folder(tmp_path) as scratch:
            (scratch / "model").write_text("half")
            os._exit(0)
    os.waitpid(child, 0)
    (tmp_path / "mine").mkdir()
    assert len(list(tmp_path.iterdir())) == 2
    with scratch_folder(tmp_path) as first, scratch_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first, second, tmp_path / "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
