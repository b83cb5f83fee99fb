"""Files that end: a named pipe or a device may keep whoever reads it waiting for ever."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

_BLOCK = 1 << 20


def check_ends(path: str | Path) -> None:
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


def read_plain(path: str | Path, most: int) -> bytes:
    """The content of a file.

    Args:
        path: of the file.
        most: bytes that it may hold.

    Raises:
        OSError: it cannot be read, is no file, or holds more.
        ValueError: the path holds a NUL.
    """
    check_ends(path)
    blocks, size = [], 0
    with Path(path).open("rb") as file:
        while block := file.read(_BLOCK):
            blocks.append(block)
            size += len(block)
            if size > most:
                raise OSError(errno.EFBIG, f"it is larger than {most >> 20} MiB", str(path))
    return b"".join(blocks)
