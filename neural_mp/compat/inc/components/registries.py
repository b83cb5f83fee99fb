"""What datasets, transforms and metrics of theirs share: registries, and forms of what they get.

A model with several outputs gives a metric a list, a tuple or a dict of arrays, a model with one
output the array, or a list that holds it. Sample weights are of no effect, as there.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import DATASETS as OUR_DATASETS
from neural_mp.data import TRANSFORMS as OUR_TRANSFORMS
from neural_mp.data.option_checks import finite_number, whole_number
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics import METRICS as OUR_METRICS
from neural_mp.metrics.predictions import as_array
from neural_mp.util.pytree import as_numpy

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


def words(option: str, value: Any) -> list[Any]:
    """A list as it is; `"a, b"` and `"a b"` as a list of words; anything else as the only item."""
    if isinstance(value, str):
        found = value.replace(",", " ").split()
        if not found:
            raise ConfigurationError(f"{option} is empty")
        return list(found)
    return list(value) if isinstance(value, Sequence) else [value]


def numbers(option: str, value: Any) -> tuple[float, ...]:
    """One number or several, also written as `"1.0, 2.0"` or `"1.0 2.0"`."""
    found = tuple(finite_number(option, _number(item)) for item in words(option, value))
    if not found:
        raise ConfigurationError(f"{option} is empty")
    return found


def sizes(option: str, value: Any) -> tuple[int, ...]:
    """Whole numbers from 1 on, also written as `"3, 224, 224"`."""
    given = words(option, value)
    return tuple(whole_number(f"each of {option}", _number(item), minimum=1) for item in given)


def _number(item: Any) -> Any:
    if not isinstance(item, str):
        return item
    for kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            continue
    return item


def parts(values: Any) -> list[Any]:
    """The arrays that a list, tuple or dict holds; anything else, a list of numbers too, alone."""
    if isinstance(values, Mapping):
        return list(values.values())
    if isinstance(values, list | tuple) and any(getattr(v, "ndim", 0) > 0 for v in values):
        return list(values)
    return [values]


def as_one(values: Any, what: str) -> np.ndarray:
    """All of `values` as one array; a list of several arrays is stacked along a new first axis.

    Args:
        values: what a model or a dataloader gave.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: they do not form one array of numbers.
    """
    pieces = parts(values)
    if len(pieces) == 1:
        return as_array(pieces[0], what)
    shapes = [np.shape(piece) for piece in pieces]
    if len(set(shapes)) != 1:
        raise MetricError(
            f"the {what} are {len(pieces)} arrays of the shapes {shapes[:4]}, and this metric "
            f"takes one; a postprocess transform or a metric of your own can choose among them"
        )
    return np.stack([as_array(piece, what) for piece in pieces])


def text(value: Any) -> str:
    """A string, given as such, as bytes in UTF-8, or as an array of one; a number as its digits."""
    if not isinstance(value, str | bytes):
        array = as_numpy(value)
        value = array.item() if array.size == 1 else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


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
