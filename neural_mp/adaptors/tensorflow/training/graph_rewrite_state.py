"""Whether the graph rewrite counts now, known without TensorFlow."""

from __future__ import annotations

from contextlib import ExitStack

#: Undoes all that is switched on; None while nothing is.
_undo: ExitStack | None = None


def rewrite_is_enabled() -> bool:
    """Whether `enable_mixed_precision_graph_rewrite` counts now."""
    return _undo is not None


def switch_on(undo: ExitStack) -> None:
    """Note that the rewrite counts, and what ends that; it must not count already."""
    global _undo
    _undo = undo


def switch_off() -> None:
    """End what counts; without effect where nothing does."""
    global _undo
    if _undo is not None:
        _undo.close()
    _undo = None
