"""Registries of the names in YAML: registered names, entry points, or `module:attribute`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, TypeVar

from neural_mp.data.user_imports import load_user_object
from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean, error_path
from neural_mp.util.plug_ins import load_object, read_entry_points
from neural_mp.util.text import with_article

Factory = TypeVar("Factory", bound=Callable[..., Any])


class Registry:
    """Factories of one category, found by name.

    Names are compared without regard to case, `_` and `-`. Iteration yields the names in the
    order of registration, without aliases, and then those of entry points.

    Args:
        kind: category of the factories, for messages: `"dataset"`.
        beyond: fallback registry for names that are not registered here.
        group: entry-point group of third-party factories; registered names take precedence.
    """

    def __init__(self, kind: str, beyond: Registry | None = None, group: str | None = None) -> None:
        self.kind = kind
        self._beyond = beyond
        self._group = group
        self._factories: dict[str, Callable[..., Any]] = {}
        self._names: list[str] = []

    def register(self, name: str, *aliases: str) -> Callable[[Factory], Factory]:
        """Return a decorator that registers a class or function as `name` and its aliases.

        Raises:
            ConfigurationError: a name is already registered.
        """

        def add_factory(factory: Factory) -> Factory:
            for alias in (name, *aliases):
                if normalize_registered_name(alias) in self._factories:
                    raise ConfigurationError(f"{self.kind} {alias!r} is registered already")
            self._factories.update(
                {normalize_registered_name(alias): factory for alias in (name, *aliases)}
            )
            self._names.append(name)
            return factory

        return add_factory

    def __iter__(self) -> Iterator[str]:
        yield from self._names
        yield from (entry.name for entry in self._plug_in_entries().values())
        if self._beyond is not None:
            yield from (
                name
                for name in self._beyond
                if normalize_registered_name(name) not in self._factories
            )

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        registered = isinstance(name, str) and (
            normalize_registered_name(name) in self._factories
            or self._find_plug_in(name) is not None
        )
        return registered or (self._beyond is not None and name in self._beyond)

    def find_factory(self, name: str) -> Callable[..., Any]:
        """Return the factory of `name`: a registered name, an entry point or `module:attribute`.

        Raises:
            ConfigurationError: the name is not registered and cannot be imported.
        """
        if isinstance(name, str) and normalize_registered_name(name) in self._factories:
            return self._factories[normalize_registered_name(name)]
        if isinstance(name, str) and (entry := self._find_plug_in(name)) is not None:
            return self._check_callable(name, self._load_plug_in(entry))
        if self._beyond is not None and name in self._beyond:
            return self._beyond.find_factory(name)
        if not isinstance(name, str) or ":" not in name:
            raise ConfigurationError(
                f"unknown {self.kind} {name!r}{did_you_mean(name, self)} "
                f"(name your own {self.kind} as module:attribute)"
            )
        return self._check_callable(name, load_user_object(name))

    def _plug_in_entries(self) -> dict[str, metadata.EntryPoint]:
        """Normalized name → entry point that no registered name hides."""
        if self._group is None:
            return {}
        named = {
            normalize_registered_name(entry.name): entry for entry in read_entry_points(self._group)
        }
        return {name: entry for name, entry in named.items() if name not in self._factories}

    def _find_plug_in(self, name: str) -> metadata.EntryPoint | None:
        # `module:attribute` is no entry point.
        return None if ":" in name else self._plug_in_entries().get(normalize_registered_name(name))

    def _load_plug_in(self, entry: metadata.EntryPoint) -> Any:
        try:
            return load_object(entry)
        except ImportError as error:
            raise ConfigurationError(
                f"{self.kind} {entry.name!r} of the entry point {entry.value!r} {error}"
            ) from error

    def _check_callable(self, name: str, factory: object) -> Callable[..., Any]:
        if not callable(factory):
            raise ConfigurationError(
                f"{self.kind} {name!r} must be a class, or a function that returns a {self.kind}, "
                f"got {with_article(type(factory).__name__)}"
            )
        function: Callable[..., Any] = factory
        return function

    def build(self, name: str, options: Mapping[str, Any] | None = None) -> Any:
        """Call the factory of `name` with `options` as keyword arguments.

        Raises:
            ConfigurationError: the name or an option is unknown, or an option is missing.
        """
        with error_path(name):
            return self.call_factory(
                name, self.find_factory(name), {} if options is None else options
            )

    def call_factory(
        self, name: str, factory: Callable[..., Any], options: Mapping[str, Any]
    ) -> Any:
        """Call a factory with `options` as keyword arguments.

        Raises:
            ConfigurationError: an option is unknown or missing.
        """
        if not isinstance(options, Mapping):
            raise ConfigurationError(
                f"the options of {self.kind} {name!r} must be written as option: value, "
                f"got {options!r}"
            )
        _check_options(f"{self.kind} {name!r}", factory, options)
        try:
            return factory(**options)
        except NeuralMPError as error:
            if not error.keys:  # the option that the message mentions first
                names = "|".join(re.escape(str(option)) for option in options)
                match = re.search(rf"\b({names})\b", str(error)) if names else None
                error.keys = (match[1],) if match else ()
            raise


def normalize_registered_name(name: str) -> str:
    """Normalize a name as registries compare it: without case, `_` and `-`."""
    return name.casefold().replace("_", "").replace("-", "")


def _check_options(what: str, factory: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Compare options with the signature, so that a TypeError from inside stays unchanged."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # some C classes have no signature
        return
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    accepted = [parameter.name for parameter in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    for option in options:
        if not isinstance(option, str) or (option not in accepted and not takes_any):
            error = ConfigurationError(
                f"{what} has no option {option!r}"
                f"{did_you_mean(option, accepted) or '; it takes no options'}"
            )
            error.keys = (option,)
            raise error
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for parameter in parameters:
        needed = parameter.default is parameter.empty and parameter.kind not in variable
        if needed and parameter.name not in options:
            raise ConfigurationError(f"{what} needs the option {parameter.name!r}")
