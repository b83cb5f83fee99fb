"""Who does a job: one process at a time, told by a lock that ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows, where two commands must not share a folder
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = "lock"


@contextmanager
def claimed(folder: Path) -> Iterator[int | None]:
    """A lock on the folder of a job.

    Yields:
        The file descriptor that holds it, for processes that shall hold it, too; None where another
        process has the lock.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_FILE).open("a") as file:
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
        yield file.fileno()
