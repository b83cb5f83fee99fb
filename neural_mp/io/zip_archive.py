"""Zip archives from strangers: what is in them is checked before anything of it is read."""

from __future__ import annotations

import re
import stat
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from neural_mp.errors import ModelLoadError, NeuralMPError, one_line
from neural_mp.io.limits import MAX_ARCHIVE_MEMBERS, MAX_COMPRESSION_RATIO, RATIO_EXEMPT_MODEL_BYTES

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
#: What `zipfile` raises about the bytes it reads.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)
_UNSAFE_NAME = re.compile(r"[\x00-\x1f\x7f\\]|^/|^[A-Za-z]:|(^|/)\.\.?(/|$)|//")


@contextmanager
def checked_archive(
    file: Path | BinaryIO, error: type[NeuralMPError] = ModelLoadError
) -> Iterator[zipfile.ZipFile]:
    """A zip archive whose members have safe names, each once, and sizes that the file can hold.

    `ZipFile.read` gives at most the declared size of a member, so that what is checked here bounds
    what reading takes. Other readers may see another archive in the same bytes: members are read
    from this one, or written anew from it.

    Args:
        file: a path, or a binary file that can be sought.
        error: what is raised.

    Raises:
        NeuralMPError: of the class `error`; the file is no archive, is damaged (a member that
            fails its checksum too), or holds a member that is never read.
    """
    shown = str(file) if isinstance(file, Path) else str(getattr(file, "name", "the archive"))
    try:
        with _opened(file) as archive:
            for fault in _faults(archive):
                raise error(f"{shown!r} is not read: {fault}. Save it again")
            yield archive
    except _DAMAGE as problem:
        raise error(f"{shown!r} is no zip archive, or damaged: {one_line(problem)}") from problem


def _opened(file: Path | BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except ValueError as problem:  # of positions and names that make no sense
        raise zipfile.BadZipFile(str(problem)) from problem


def _faults(archive: zipfile.ZipFile) -> Iterator[str]:
    """What is wrong with the members of an archive, in words."""
    members = archive.infolist()
    if len(members) > MAX_ARCHIVE_MEMBERS:
        yield f"it holds {len(members)} members, more than {MAX_ARCHIVE_MEMBERS}"
    names: set[str] = set()
    packed = 0
    for member in members:
        name = member.filename
        shown = f"its member {name[:100]!r}"
        if _UNSAFE_NAME.search(name) or member.orig_filename != name:
            yield f"{shown} has a name that leads out of the archive"
        if name in names:
            yield f"{shown} is there twice"
        names.add(name)
        if stat.S_ISLNK(member.external_attr >> 16):
            yield f"{shown} is a link"
        if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
            yield f"{shown} is encrypted, or packed in an unusual way"
        packed_well = MAX_COMPRESSION_RATIO * member.compress_size
        if member.file_size > max(packed_well, RATIO_EXEMPT_MODEL_BYTES):
            yield f"{shown} is {member.file_size} bytes, packed into {member.compress_size}"
        packed += member.compress_size
    if archive.fp is not None and packed > archive.fp.seek(0, 2):
        yield "its members overlap"
