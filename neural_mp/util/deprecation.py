"""Deprecation of public functions and classes, for the time that CONTRIBUTING.md promises."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_R = TypeVar("_R")
#: Minor versions from the first warning to the removal.
WARNING_RELEASES = 2


@dataclass(frozen=True)
class Deprecation:
    """A public name that will be removed.

    Attributes:
        name: the name with its module.
        since: version that first warns, such as `0.2`.
        removed_in: version without the name.
        instead: what to use, as the end of a sentence.
    """

    name: str
    since: str
    removed_in: str
    instead: str

    def __post_init__(self) -> None:
        first, last = _parse_version(self.since), _parse_version(self.removed_in)
        if first[0] == last[0] and last[1] - first[1] < WARNING_RELEASES:
            raise ValueError(
                f"removed_in must be {WARNING_RELEASES} minor versions after since = {self.since}, "
                f"or a later major version, got {self.removed_in}"
            )

    def is_due(self, version: str) -> bool:
        """Whether a version must no longer have the name."""
        return _parse_version(version) >= _parse_version(self.removed_in)

    def __str__(self) -> str:
        return (
            f"{self.name} is deprecated since {self.since} and will be removed in "
            f"{self.removed_in}; {self.instead}"
        )


#: All deprecations of the imported modules; a test fails when one is due.
DEPRECATIONS: list[Deprecation] = []


def deprecated(
    since: str, removed_in: str, instead: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator whose functions emit a `DeprecationWarning` at the line of the caller.

    Args:
        since: version that first warns, such as `0.2`.
        removed_in: version without the function.
        instead: what to use, such as `use neural_mp.load`.

    Raises:
        ValueError: the warning would stand for less than `WARNING_RELEASES` minor versions.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        name = f"{function.__module__}.{function.__qualname__}"
        deprecation = Deprecation(name, since, removed_in, instead)
        DEPRECATIONS.append(deprecation)

        @functools.wraps(function)
        def warn_and_call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
            warnings.warn(str(deprecation), DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warn_and_call

    return decorate


def _parse_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)
