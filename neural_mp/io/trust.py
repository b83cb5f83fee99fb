"""What the user trusts by name, while something of a file is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_names: ContextVar[tuple[str, ...]] = ContextVar("trusted", default=())


@contextmanager
def trusting(names: Iterable[str]) -> Iterator[None]:
    """Trust these names inside, too.

    Args:
        names: modules that a tuning file may name code of, and ops that the file of a model may
            hold although they do more than compute.
    """
    before = _names.set((*_names.get(), *names))
    try:
        yield
    finally:
        _names.reset(before)


def is_trusted(name: str) -> bool:
    """Whether a name is trusted, or what it is in: `sklearn.metrics` where `sklearn` is."""
    return any(name == word or name.startswith(f"{word}.") for word in _names.get())
