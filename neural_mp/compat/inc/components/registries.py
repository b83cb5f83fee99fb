"""What datasets of theirs share: options without a meaning here, and packages they need."""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import DATASETS as OUR_DATASETS
from neural_mp.data import TRANSFORMS as OUR_TRANSFORMS
from neural_mp.data.option_checks import existing_path, finite_number, whole_numbers
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError
from neural_mp.metrics import METRICS as OUR_METRICS

_WHY_IGNORED = {
    "filter": "all samples of the dataset are used",
    "num_cores": "files are read one after the other",
}


def say_ignored(dataset: str, **options: Any) -> None:
    """Warn of each option that was given (is not None) and has no effect."""
    for option, value in options.items():
        if value is not None:
            message = f"dataset {dataset!r}: {option} is ignored: {_WHY_IGNORED[option]}"
            warnings.warn(message, IgnoredSettingWarning, stacklevel=3)


def package(name: str, needed_by: str, extra: str) -> Any:
    """The module `name`, imported.

    Args:
        name: of the module.
        needed_by: what needs it, for the message.
        extra: which of our extras brings it.

    Raises:
        MissingFrameworkError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingFrameworkError(
            f"{needed_by} needs {name}; install it with: pip install 'neural-mp[{extra}]'"
        ) from error


def words(option: str, value: Any) -> list[Any]:
    """A list as it is; `"a, b"` and `"a b"` as a list of words; anything else as the only item."""
    if isinstance(value, str):
        found = value.replace(",", " ").split()
        if not found:
            raise ConfigurationError(f"{option} is empty")
        return list(found)
    return list(value) if isinstance(value, Sequence) else [value]


def numbers(option: str, value: Any) -> tuple[float, ...]:
    """One number or several, also written as `"1.0, 2.0"`."""
    return tuple(finite_number(option, _number(item)) for item in words(option, value))


def sizes(option: str, value: Any) -> tuple[int, ...]:
    """Whole numbers from 1 on, also written as `"3, 224, 224"`."""
    return whole_numbers(option, [*map(_number, words(option, value))], minimum=1)


def _number(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    for kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            continue
    return item


def existing_folder(option: str, value: Any) -> Path:
    """The folder `value`, which must exist.

    Raises:
        ConfigurationError: it is no path.
        DataError: nothing, or a file, is there.
    """
    path = existing_path(option, value)
    if not path.is_dir():
        raise DataError(f"{option} must be a folder; {path} is a file")
    return path


def existing_file(option: str, value: Any) -> Path:
    """The file `value`, which must exist.

    Raises:
        ConfigurationError: it is no path.
        DataError: nothing, or a folder, is there.
    """
    path = existing_path(option, value)
    if path.is_dir():
        raise DataError(f"{option} must be a file; {path} is a folder")
    return path


Factory = TypeVar("Factory", bound=Callable[..., Any])

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")


class ShortRegistry(Registry):
    """A registry where a value alone stands for the first option: `Resize: 256`."""

    def build(self, name: str, options: Any = None) -> Any:
        """Call the factory that `name` stands for with `options`, or with one value alone.

        Raises:
            ConfigurationError: the name or an option is not known, or an option is missing.
        """
        if options is not None and not isinstance(options, Mapping):
            parameters = [*inspect.signature(self.find(name)).parameters]
            if parameters:
                options = {parameters[0]: options}
        return super().build(name, options)


def _registries(kind: str, ours: Registry) -> Mapping[str | None, Registry]:
    shared = ShortRegistry(kind, beyond=ours)
    return {None: shared, **{name: ShortRegistry(kind, beyond=shared) for name in FRAMEWORKS}}


#: Framework → its names; None → those that all of them have.
DATASETS = _registries("dataset", OUR_DATASETS)
TRANSFORMS = _registries("transform", OUR_TRANSFORMS)
METRICS = _registries("metric", OUR_METRICS)


def registered(
    registries: Mapping[str | None, Registry], name: str, *frameworks: str
) -> Callable[[Factory], Factory]:
    """Decorate what a name stands for, with some frameworks, or without any named, with all."""

    def add(factory: Factory) -> Factory:
        for framework in frameworks or (None,):
            registries[framework].register(name)(factory)
        return factory

    return add
