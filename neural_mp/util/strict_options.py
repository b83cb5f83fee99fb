"""Options as attributes of a dataclass, of which misspelled ones are refused."""

from __future__ import annotations

from dataclasses import fields

from neural_mp.errors import ConfigurationError, did_you_mean


class StrictOptions:
    """Base of dataclasses of options: an unknown attribute is an error, not a new attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        if name not in names:
            raise ConfigurationError(
                f"{type(self).__name__} has no option {name!r}{did_you_mean(name, names)}"
            )
        super().__setattr__(name, value)
