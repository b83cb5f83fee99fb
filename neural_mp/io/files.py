"""Safe file access: regular files only, bounded reads, atomic writes."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from neural_mp.errors import ConfigurationError, ModelLoadError

#: Characters of a file's name in the name of its scratch file.
_SCRATCH_CHARS = 40
#: Characters of a name in a message.
_SHOWN_CHARS = 200


def resolve_sibling(model: Path, name: str, folder: str = "") -> Path:
    """Return the path of a file that a model references in its folder or a subfolder.

    If the model is a link, as in download caches, the folder of the link's target is accepted, too.

    Raises:
        ModelLoadError: the name or a link leads out of the model's folder, or the file cannot be
            accessed, e.g. as its name is too long.
    """
    file, inside = model.parent / folder / name, False
    try:
        roots = [model.parent.resolve(), model.resolve().parent]
        inside = any(file.resolve().is_relative_to(root) for root in roots)
        file.is_file()  # raises if the name is too long for the file system
    except OSError as error:
        if inside:
            raise ModelLoadError(
                f"the model {str(model)!r} references the file {name[:_SHOWN_CHARS]!r}, which "
                f"cannot be accessed: {error.strerror}"
            ) from None
    except (RuntimeError, ValueError):  # e.g. a cycle of links, or a NUL in the name
        inside = False
    if not name or "\0" in name or not inside:
        raise ModelLoadError(
            f"the model {str(model)!r} references the file {name[:_SHOWN_CHARS]!r} outside of the "
            f"model's folder; move the file into the folder, and save the model again"
        )
    return file


def is_utf8(path: Path) -> bool:
    """Whether a path can be passed to libraries that take paths in UTF-8 only."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


@contextmanager
def use_utf8_path(path: Path) -> Iterator[Path]:
    """Yield a path in UTF-8 of the same file; one through a temporary link where there is none.

    Files beside the file are reached as well, if the name of the file itself is UTF-8.
    """
    if is_utf8(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as scratch:
        link, has_name = Path(scratch) / "link", is_utf8(Path(path.name))
        link.symlink_to(path.absolute().parent if has_name else path.absolute())
        yield link / path.name if has_name else link


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file atomically, creating folders; readers see the old or the new content.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    with open_atomic_file(path) as file:
        file.write(content)


@contextmanager
def open_atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name at the end of the context, creating folders.

    Raises:
        OSError: the file cannot be written; the old content stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # The whole name may be as long as the file system allows.
    scratch = path.with_name(f".{path.name[:_SCRATCH_CHARS]}.{uuid.uuid4().hex}")
    try:
        with scratch.open("wb") as file:
            yield file
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


_BLOCK = 1 << 20


def find_working_directory() -> Path | None:
    """Return the working directory; None if the directory was deleted."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return None


def describe_working_directory() -> str:
    """Return the working directory for an error message."""
    folder = find_working_directory()
    return "the working directory, which was deleted" if folder is None else repr(str(folder))


def require_regular_file(path: str | Path) -> None:
    """Raise an error if a path is neither a file nor a folder: reading a pipe may block forever.

    Open pipes are allowed, e.g. `/dev/stdin` or a shell's `<(command)`, because their path resolves
    to no file. So are missing paths.

    Raises:
        OSError: the path is a named pipe, a socket or a device.
    """
    try:
        mode = Path(os.path.realpath(path)).stat().st_mode
    except OSError:
        return  # opening the file raises the error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        problem = "not a regular file, but a pipe, a socket or a device"
        raise OSError(errno.EINVAL, problem, str(path))


def read_bounded(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: unreadable, not a regular file, or larger than `max_bytes`.
        ValueError: the path contains a NUL.
    """
    require_regular_file(path)
    blocks, size = [], 0
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > max_bytes:
                problem = f"size exceeds the limit of {max_bytes >> 20} MiB"
                raise OSError(errno.EFBIG, problem, str(path))
    return b"".join(blocks)


def create_writable_folder(log_path: str | None) -> Path | None:
    """Create the log folder and check write access, before anything is computed.

    Raises:
        ConfigurationError: the folder is not writable.
    """
    if log_path is None:
        return None
    try:
        folder = Path(log_path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigurationError(f"log_path {log_path!r} cannot be written to: {error}") from error
