"""What a script gives as its configuration, as `Settings`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.compat.inc.dotted import Dotted
from neural_mp.config import Settings, load_settings, settings_from
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError


def settings_of(conf: Any) -> Settings:
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
