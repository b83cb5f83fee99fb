"""Names that the user trusts while a file is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[tuple[str, ...]] = ContextVar("trusted", default=())


@contextmanager
def trusting(names: Iterable[str]) -> Iterator[None]:
    """Trust further names in this context.

    Args:
        names: modules whose code a tuning file may reference, and ops with side effects that a
            model file may contain.
    """
    token = _names.set((*_names.get(), *names))
    try:
        yield
    finally:
        _names.reset(token)


def is_trusted(name: str) -> bool:
    """Whether a name or any of its parents is trusted: `sklearn.metrics` if `sklearn` is."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in _names.get())
