"""Takes the lines of a kernel log out of a stream in which a program writes its own text, too."""

from __future__ import annotations

import re
from collections.abc import Callable

from neural_mp.profiling.kernel_log_onednn import MARKERS

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
