"""The machine at hand, as far as tests may say something of it: what is there, and no more."""

from __future__ import annotations

from neural_mp.core.hardware import NATIVE_FLAGS, Hardware, detect
from neural_mp.core.precision import Precision

#: The flags of this CPU that decide on INT8, and on nothing else.
INTEGER_FLAGS = detect({}).flags & frozenset(NATIVE_FLAGS[Precision.INT8])


def machine(*forced: Precision) -> Hardware:
    """This machine without its 16-bit instructions, and with what is forced on."""
    return Hardware("this machine", INTEGER_FLAGS, 2, forced=frozenset(forced))
