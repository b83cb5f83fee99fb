"""State of the graph rewrite (enabled or not), without importing TensorFlow."""

from __future__ import annotations

from contextlib import ExitStack

#: Undoes the rewrite; None while disabled.
_undo: ExitStack | None = None


def rewrite_is_enabled() -> bool:
    """Whether `enable_mixed_precision_graph_rewrite` is in effect."""
    return _undo is not None


def switch_on(undo: ExitStack) -> None:
    """Record the rewrite as enabled, with the actions that undo it; must be disabled before."""
    global _undo
    _undo = undo


def switch_off() -> None:
    """Undo the rewrite; without effect if disabled."""
    global _undo
    if _undo is not None:
        _undo.close()
    _undo = None
