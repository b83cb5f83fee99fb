"""Catches what C code of this process writes to standard output, and lets the rest through."""

from __future__ import annotations

import ctypes
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from neural_mp.errors import KernelLogError
from neural_mp.profiling.kernel_log_parsers import MARKERS

_MARKERS = tuple(marker.encode() for marker in MARKERS)
_MARKER = re.compile(b"|".join(_MARKERS))


class Sieve:
    """Splits a stream of bytes that comes in pieces.

    Args:
        keep: is given every line of the log, without what stands before it on its line.
    """

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep, self._rest = keep, b""

    def passed(self, part: bytes) -> bytes:
        """Of one more piece, what is not of the log, as soon as that is sure."""
        *lines, rest = (self._rest + part).split(b"\n")
        through = []
        for line in lines:
            found = _MARKER.search(line)
            if found:
                self._keep(line[found.start() :].decode("utf-8", "replace"))
                through.append(line[: found.start()])
            else:
                through.append(line + b"\n")
        found = _MARKER.search(rest)
        held = found.start() if found else len(rest) - _held_back(rest)
        self._rest = rest[held:]
        return b"".join((*through, rest[:held]))

    def ended(self) -> bytes:
        """What was still held back, at the end of the stream."""
        rest, self._rest = self._rest, b""
        if _MARKER.match(rest):
            self._keep(rest.decode("utf-8", "replace"))
            return b""
        return rest


def _held_back(rest: bytes) -> int:
    """How many of the last bytes may be the begin of a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for count in range(min(longest, len(rest)), 0, -1):
        if any(marker.startswith(rest[-count:]) for marker in _MARKERS):
            return count
    return 0


_STANDARD_OUTPUT = 1
#: Seconds after which what a program prints appears at the latest.
_DELAY = 0.05
_in_use = threading.Lock()


@contextmanager
def sieved_output(sieve: Sieve) -> Iterator[None]:
    """Send standard output through a sieve meanwhile; what passes it is printed as it comes.

    It goes through a file, not a pipe: a kernel that writes while it holds Python's lock would
    wait for ever once a pipe is full, for a reader that needs that lock. What another process,
    started meanwhile, prints later than the end is lost.

    Raises:
        KernelLogError: this goes on already, or there is no standard output.
    """
    if not _in_use.acquire(blocking=False):
        raise KernelLogError("a kernel log is kept already; only one can be kept at a time")
    try:
        with _real_output() as real, tempfile.TemporaryFile() as file:
            ended = threading.Event()
            arguments = (file.fileno(), real, sieve, ended)
            reading = threading.Thread(target=_follow, args=arguments, daemon=True)
            _flush()
            os.dup2(file.fileno(), _STANDARD_OUTPUT)
            reading.start()
            try:
                yield
            finally:
                _flush()
                os.dup2(real, _STANDARD_OUTPUT)
                ended.set()
                reading.join()
    finally:
        _in_use.release()


@contextmanager
def _real_output() -> Iterator[int]:
    try:
        # Where Python found it closed, something else may have its number by now.
        real = os.dup(_STANDARD_OUTPUT if sys.stdout is not None else -1)
    except OSError:
        raise KernelLogError(
            "standard output is closed, and oneDNN writes its log there; start the program with "
            "it open, such as with `> /dev/null`"
        ) from None
    try:
        yield real
    finally:
        os.close(real)


def _flush() -> None:
    """Write out what Python and C still hold back."""
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _follow(file: int, real: int, sieve: Sieve, ended: threading.Event) -> None:
    """Read a file while it grows, until the end that it has when writing has ended."""
    place, last = 0, False
    while True:
        while part := os.pread(file, 1 << 16, place):
            place += len(part)
            _write(real, sieve.passed(part))
        if last:
            break
        last = ended.wait(_DELAY)
    _write(real, sieve.ended())


def _write(target: int, text: bytes) -> None:
    while text:
        text = text[os.write(target, text) :]
