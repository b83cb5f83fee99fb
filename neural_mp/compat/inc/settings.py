"""What a script gives as its configuration, as `Settings`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.config import Settings, load_settings, settings_from
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError


class Dotted(dict[str, Any]):
    """A mapping whose keys are attributes, too; one that is missing is made when it is read."""

    def __init__(self, content: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        for key, value in (content or {}).items():
            self[key] = value

    def __setitem__(self, key: str, value: object) -> None:
        super().__setitem__(key, Dotted(value) if type(value) is dict else value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in self:
            self[name] = Dotted()
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        self.pop(name, None)

    def plain(self) -> dict[str, Any]:
        """The same as plain dicts, without what was read and never set."""
        found = {key: _plain(value) for key, value in self.items()}
        return {key: value for key, value in found.items() if value != {}}


def _plain(value: object) -> Any:
    if isinstance(value, Dotted):
        return value.plain()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


#: What scripts set before they make a `Quantization` or a `MixedPrecision`.
conf = Dotted()


def settings_of(conf: object) -> Settings:
    """The settings of a configuration.

    Args:
        conf: None; the path of a YAML file; settings by attribute or as a dict; or an object of
            `neural_compressor.conf.config`, which holds one of these.

    Raises:
        ConfigurationError: it is none of these, or its content is not as it should be.
    """
    conf = getattr(conf, "conf", conf) if not isinstance(conf, Dotted) else conf
    if conf is None:
        return of_mapping({})
    if isinstance(conf, str | os.PathLike):
        return _theirs(load_settings(Path(conf), Dialect.INC))
    if isinstance(conf, Dotted):
        return of_mapping(conf.plain())
    if isinstance(conf, Mapping):
        return of_mapping(Dotted(conf).plain())
    raise ConfigurationError(
        f"expected the path of a YAML file or a configuration, got {conf!r} of type "
        f"{type(conf).__name__}"
    )


def of_mapping(content: Mapping[str, Any]) -> Settings:
    """The settings of plain data, as a YAML file holds them.

    Raises:
        ConfigurationError: a key or a value is not as it should be.
    """
    return _theirs(settings_from(content, dialect=Dialect.INC))


def _theirs(settings: Settings) -> Settings:
    """Settings without a name of the model that is a mere label, as it is there as a rule."""
    name = settings.model.name
    if name is None or Path(name).exists() or ":" in name:
        return settings
    return replace(settings, model=replace(settings.model, name=None))
