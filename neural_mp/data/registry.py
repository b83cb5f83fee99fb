"""What YAML can name: by a known name or as the user's own `module:attribute`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from neural_mp.data.user_imports import load_user_object
from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean, error_path
from neural_mp.util.text import with_article

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Factories of one kind of thing, found by name.

    Names are compared without regard to case, `_` and `-`. Iterating gives the names as they
    were registered, without aliases.

    Args:
        kind: what is registered, for messages: `"dataset"`.
        beyond: where a name is looked for that is not registered here.
    """

    def __init__(self, kind: str, beyond: Registry | None = None) -> None:
        self.kind = kind
        self._beyond = beyond
        self._factories: dict[str, Callable[..., Any]] = {}
        self._names: list[str] = []

    def register(self, name: str, *aliases: str) -> Callable[[Factory], Factory]:
        """Decorate the class or function that makes what `name` and its aliases stand for.

        Raises:
            ConfigurationError: one of the names is taken.
        """

        def add(factory: Factory) -> Factory:
            for word in (name, *aliases):
                if plain_name(word) in self._factories:
                    raise ConfigurationError(f"{self.kind} {word!r} is registered already")
            self._factories.update({plain_name(word): factory for word in (name, *aliases)})
            self._names.append(name)
            return factory

        return add

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        if self._beyond is not None:
            yield from (name for name in self._beyond if plain_name(name) not in self._factories)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        here = isinstance(name, str) and plain_name(name) in self._factories
        return here or (self._beyond is not None and name in self._beyond)

    def find(self, name: str) -> Callable[..., Any]:
        """The factory that `name`, a known name or `module:attribute`, stands for.

        Raises:
            ConfigurationError: nothing of that name is known or can be imported.
        """
        if isinstance(name, str) and plain_name(name) in self._factories:
            return self._factories[plain_name(name)]
        if self._beyond is not None and name in self._beyond:
            return self._beyond.find(name)
        if not isinstance(name, str) or ":" not in name:
            raise ConfigurationError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self)} "
                f"(one of your own is named module:attribute)"
            )
        factory = load_user_object(name)
        if not callable(factory):
            raise ConfigurationError(
                f"{self.kind} {name!r} is {with_article(type(factory).__name__)}; "
                f"it must be a class, or a function that makes a {self.kind}"
            )
        return factory

    def build(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Call the factory that `name` stands for with `options` as keyword arguments.

        Raises:
            ConfigurationError: the name or an option is not known, or an option is missing.
        """
        with error_path(name):
            return self._built(name, {} if options is None else options)

    def _built(self, name: str, options: Mapping[str, Any]) -> Any:
        factory = self.find(name)
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f"the options of {self.kind} {name!r} must be written as option: value, "
                f"got {options!r}"
            )
        _check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except NeuralMPError as error:
            error.keys = error.keys or _culprit(str(error), options)
            raise


def plain_name(name: str) -> str:
    """A name as registries compare it: without case, `_` and `-`."""
    return name.casefold().replace("_", "").replace("-", "")


def _culprit(message: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """The one of the options that a message speaks of first; empty where it speaks of none."""
    names = "|".join(re.escape(str(option)) for option in options)
    found = re.search(rf"\b({names})\b", message) if names else None
    return (found[1],) if found else ()


def _check_options(what: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Compare options with the signature, so that a TypeError from inside is left as it is."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some classes written in C do not tell their signature
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [parameter.name for parameter in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if not isinstance(option, str) or (option not in known and not takes_any):
            hint = did_you_mean(option, known) or "; it takes no options"
            with error_path(option):
                raise ConfigurationError(f"{what} has no option {option!r}{hint}")
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in variable
        if needed and parameter.name not in options:
            raise ConfigurationError(f"{what} needs the option {parameter.name!r}")
