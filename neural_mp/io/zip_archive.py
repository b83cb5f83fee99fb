"""Untrusted zip archives: members are checked before any is read."""

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
from neural_mp.io.limits import (
    MAX_ARCHIVE_MEMBERS,
    MAX_COMPRESSION_RATIO,
    RATIO_EXEMPT_ARRAY_BYTES,
    RATIO_EXEMPT_MODEL_BYTES,
    count_excess_bytes,
)

_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
#: Exceptions of `zipfile` for damaged archives.
_DAMAGE = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError)
_UNSAFE_NAME_RE = re.compile(r"[\x00-\x1f\x7f\\]|^/|^[A-Za-z]:|(^|/)\.\.?(/|$)|//")


@contextmanager
def open_checked_archive(
    file: Path | BinaryIO, error: type[NeuralMPError] = ModelLoadError
) -> Iterator[zipfile.ZipFile]:
    """Open a zip archive whose members have unique, safe names and plausible sizes.

    `ZipFile.read` returns at most a member's declared size, so the checks bound all reads. Other
    readers may interpret the bytes differently: read members from the returned archive, or rewrite
    them with it.

    Raises:
        NeuralMPError: of class `error`, if the file is not an archive, is damaged (including
            checksum errors while reading), or has a refused member.
    """
    name = str(file) if isinstance(file, Path) else str(getattr(file, "name", "the archive"))
    try:
        with _open_archive(file) as archive:
            for fault in _describe_member_faults(archive):
                raise error(f"{name!r} is refused: {fault}; save the file again")
            yield archive
    except _DAMAGE as problem:
        raise error(f"{name!r} is damaged or not a zip archive: {one_line(problem)}") from problem


def _open_archive(file: Path | BinaryIO) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(file)
    except ValueError as problem:  # invalid offsets or names
        raise zipfile.BadZipFile(str(problem)) from problem


def _describe_member_faults(archive: zipfile.ZipFile) -> Iterator[str]:
    members = archive.infolist()
    if len(members) > MAX_ARCHIVE_MEMBERS:
        yield f"number of members: limit {MAX_ARCHIVE_MEMBERS}, got {len(members)}"
    names: set[str] = set()
    total = 0
    for member in members:
        name = member.filename
        subject = f"member {name[:100]!r}"
        if _UNSAFE_NAME_RE.search(name) or member.orig_filename != name:
            yield f"the name of {subject} leads out of the archive"
        if name in names:
            yield f"{subject} occurs twice"
        names.add(name)
        if stat.S_ISLNK(member.external_attr >> 16):
            yield f"{subject} is a link"
        if member.flag_bits & _ENCRYPTED or member.compress_type not in _METHODS:
            yield f"{subject} is encrypted, or compressed by an unsupported method"
        plausible = MAX_COMPRESSION_RATIO * member.compress_size
        if member.file_size > max(plausible, RATIO_EXEMPT_MODEL_BYTES):
            yield (
                f"compression ratio of {subject}: limit {MAX_COMPRESSION_RATIO}, got "
                f"{member.file_size} bytes from {member.compress_size} bytes"
            )
        total += member.compress_size
    excess = count_excess_bytes((member.file_size, member.compress_size) for member in members)
    if excess > RATIO_EXEMPT_ARRAY_BYTES:
        yield (
            f"members that exceed the compression ratio of {MAX_COMPRESSION_RATIO}: limit "
            f"{RATIO_EXEMPT_ARRAY_BYTES} bytes, got {excess} bytes"
        )
    if archive.fp is not None and total > archive.fp.seek(0, 2):
        yield "members overlap"
