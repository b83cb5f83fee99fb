"""Files that end: a named pipe or a device may keep whoever reads it waiting for ever."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
import uuid
from pathlib import Path

from neural_mp.errors import ConfigurationError, ModelLoadError


def resolve_sibling(model: Path, name: str, folder: str = "") -> Path:
    """The file that a model names, which lies in the model's folder or below.

    Where the model is a link, as in caches of downloaded models, it may lie beside what that leads
    to.

    Args:
        model: the model's file.
        name: as the model gives it.
        folder: the one beside the model that names begin in.

    Raises:
        ModelLoadError: it lies elsewhere, by its name or by a link.
    """
    file = model.parent / folder / name
    try:
        places = [model.parent.resolve(), model.resolve().parent]
        inside = any(file.resolve().is_relative_to(place) for place in places)
    except (OSError, RuntimeError, ValueError):  # such as links in a ring, or a zero in the name
        inside = False
    if not name or "\0" in name or not inside:
        raise ModelLoadError(
            f"{str(model)!r} names the file {name!r}, which lies outside of the model's folder; "
            f"a model may only name files that lie beside it"
        )
    return file


def write_atomic(path: Path, content: bytes) -> None:
    """Write a file; who reads it meanwhile sees what was there before. Folders are made.

    Raises:
        OSError: it cannot be written; what was there before stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


_BLOCK = 1 << 20


def require_regular_file(path: str | Path) -> None:
    """Refuse to read what is neither a file nor a folder.

    A pipe that is open already is read, such as `/dev/stdin`, or what a shell makes of
    `<(command)`: its path leads to no file.

    Args:
        path: of what is to be read; nothing has to be there.

    Raises:
        OSError: a named pipe, a socket or a device is there.
    """
    try:
        mode = Path(os.path.realpath(path)).stat().st_mode
    except OSError:
        return  # whoever opens it says why it cannot be read
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "it is no file, but a pipe, a socket or a device", str(path))


def read_bounded(path: str | Path, most: int) -> bytes:
    """The content of a file.

    Args:
        path: of the file.
        most: bytes that it may hold.

    Raises:
        OSError: it cannot be read, is no file, or holds more.
        ValueError: the path holds a NUL.
    """
    require_regular_file(path)
    blocks, size = [], 0
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > most:
                raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return b"".join(blocks)


def writable_folder(log_path: str | None) -> Path | None:
    """The folder to log to, made and found to be writable before anything is computed.

    Raises:
        ConfigurationError: it cannot be written to.
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
