"""Folders whose files are replaced as a whole, though files of others stay in them.

A new version is completed in a scratch folder, renamed to `STAGED` inside its folder, and moved
from there file by file, its manifest last. A process that is killed before the rename leaves the
earlier version; after it, the next reader or writer finishes the move.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.system.processes import ProcessIdentity

#: Name of the complete new version inside the folder that it replaces.
STAGED = ".neural_mp.staged"
_SCRATCH_PREFIX = ".neural_mp.scratch."
_OWNER = "owner.json"
_BLOCK_BYTES = 1 << 20

#: Reader of a folder's manifest: names of files, relative to the folder → digests.
ReadDigests = Callable[[Path], Mapping[str, str]]


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 digest of a file as hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Create a folder that is removed at the end, and remove those of ended processes.

    Raises:
        OSError: the parent is not writable.
    """
    for folder in parent.glob(f"{_SCRATCH_PREFIX}*"):
        if _has_ended_owner(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_SCRATCH_PREFIX, dir=parent) as scratch:
        owner = json.dumps(ProcessIdentity.of_this_process().to_dict())
        (Path(scratch) / _OWNER).write_text(owner, encoding="utf-8")
        yield Path(scratch)


def _has_ended_owner(folder: Path) -> bool:
    """Whether the process that created a scratch folder has ended; False if that is unknown."""
    try:
        owner = read_json(folder / _OWNER, ProcessIdentity.from_dict, ModelLoadError)
    except ModelLoadError:
        return False
    return owner.is_alive is False


def replace_files(
    complete: Path, target: Path, manifest: str, read_digests: ReadDigests
) -> str | None:
    """Replace the files of a version by those of the folder `complete`; other files stay.

    Files of the earlier version are those with the digests of its manifest. Links are neither
    followed nor replaced.

    Args:
        complete: the new version with its manifest, on the file system of the target.
        target: the folder; created if missing.
        manifest: name of the manifest.
        read_digests: reads the manifest of a folder.

    Returns:
        The name of a file of somebody else that bars the new version, which leaves both folders as
        they are; None if the files are replaced.

    Raises:
        OSError: the destination is not writable.
    """
    if not target.exists():
        complete.rename(target)
        return None
    foreign = finish_replacement(target, manifest, read_digests)
    if foreign is not None:
        return foreign
    own = own_files(target, manifest, read_digests)
    foreign = _foreign_file(complete, target, own)
    if foreign is None:
        complete.rename(target / STAGED)
        _move_staged(target, manifest, own, read_digests)
    return foreign


def finish_replacement(target: Path, manifest: str, read_digests: ReadDigests) -> str | None:
    """Finish an interrupted replacement; nothing happens without one.

    Returns:
        The name of a file of somebody else that bars the new version, or None.

    Raises:
        OSError: the folder is not writable.
    """
    staged = target / STAGED
    if staged.is_symlink() or not staged.is_dir():
        return None
    if (staged / manifest).is_file():
        own = own_files(target, manifest, read_digests)
        foreign = _foreign_file(staged, target, own)
        if foreign is not None:
            return foreign
        _move_staged(target, manifest, own, read_digests)
    _remove_without_files(staged)
    return None


def _move_staged(target: Path, manifest: str, own: set[Path], read_digests: ReadDigests) -> None:
    """Move the new version, manifest last, so that each step can be repeated after a kill.

    The files `own` of the earlier version that the new one lacks are removed.
    """
    staged = target / STAGED
    files = _list_files(staged)
    # Files that were moved before a kill may equal those of the earlier version.
    new = {Path(manifest), *map(Path, read_digests(staged))}
    for path in own - new:
        (target / path).unlink(missing_ok=True)
    for path in sorted(files, key=lambda path: path == Path(manifest)):
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            (staged / path).replace(target / path)
        except FileNotFoundError:  # moved by another process meanwhile
            if (staged / path).exists():
                raise
    _remove_without_files(staged)


def _remove_without_files(folder: Path) -> None:
    """Remove a folder and its subfolders unless a file is left."""
    if not _list_files(folder):
        shutil.rmtree(folder, ignore_errors=True)


def _list_files(folder: Path) -> set[Path]:
    """Return the files and links in a folder and its subfolders, relative to the folder."""
    return {
        (Path(parent) / name).relative_to(folder)
        for parent, folders, names in os.walk(folder)
        for name in names + [name for name in folders if (Path(parent) / name).is_symlink()]
    }


def own_files(folder: Path, manifest: str, read_digests: ReadDigests) -> set[Path]:
    """Return the unchanged files of the version in a folder, its manifest included."""
    if not _is_plain_file(folder, Path(manifest)):
        return set()
    own = {Path(manifest)}
    for name, digest in read_digests(folder).items():
        path = Path(name)
        if _is_plain_file(folder, path) and digest_of_file(folder / path) == digest:
            own.add(path)
    return own


def _is_plain_file(folder: Path, path: Path) -> bool:
    """Whether a path inside a folder leads to a file by no link."""
    crosses_link = any((folder / part).is_symlink() for part in _with_parents(path))
    return not crosses_link and (folder / path).is_file()


def _with_parents(path: Path) -> list[Path]:
    """Return a relative path and the folders that it names."""
    return [path, *path.parents[:-1]]


def _foreign_file(complete: Path, target: Path, own: set[Path]) -> str | None:
    """Return the first file of the new version that somebody else's file or link bars."""
    for path in sorted(_list_files(complete)):
        for part in _with_parents(path):
            destination = target / part
            is_folder = part != path and destination.is_dir() and not destination.is_symlink()
            if os.path.lexists(destination) and part not in own and not is_folder:
                return str(part)
    return None
