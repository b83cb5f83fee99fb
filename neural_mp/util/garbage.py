"""Collection of garbage around work that makes many objects which stay."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage in this context: imports and graphs leave little, but trigger much.

    After an import, all objects count as old. Otherwise, a full collection would soon search what
    was imported, in the middle of a run.
    """
    enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Unfreezing would undo what the program froze itself.
        if len(sys.modules) > modules and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
