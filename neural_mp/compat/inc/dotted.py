"""Nested settings by attribute, as `conf.tuning.exit_policy.timeout = 0`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Dotted(dict[str, Any]):
    """A mapping whose keys are attributes, too; one that is missing is made when it is read."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (content or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, Dotted(value) if type(value) is dict else value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            self[name] = Dotted()
        return self[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)

    def plain(self) -> dict[str, Any]:
        """The same as plain dicts, without what was read and never set."""
        found = {key: _plain(value) for key, value in self.items()}
        return {key: value for key, value in found.items() if value != {}}


def _plain(value: Any) -> Any:
    if isinstance(value, Dotted):
        return value.plain()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


#: What scripts set before they make a `Quantization` or a `MixedPrecision`.
conf = Dotted()
