"""Control of Optuna's log output."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silence_optuna_log() -> Iterator[None]:
    """Limit Optuna's log to warnings in this context."""
    with warnings.catch_warnings():
        # In a notebook without widgets, the first import warns about Optuna's own progress bar.
        warnings.filterwarnings("ignore", message="IProgress not found")
        import optuna

    previous = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(previous)
