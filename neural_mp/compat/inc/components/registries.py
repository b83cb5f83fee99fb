"""Registries of INC's datasets, transforms and metrics, and conversions of their arguments.

A model with several outputs passes a list, a tuple or a dict of arrays to a metric; a model with
one output passes the array, or a list that holds the array. As in INC, sample weights are ignored.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from functools import partial, wraps
from typing import Any, ClassVar, TypeVar

import numpy as np

from neural_mp.config.source import IgnoredSettingWarning
from neural_mp.data import DATASETS as OUR_DATASETS
from neural_mp.data import TRANSFORMS as OUR_TRANSFORMS
from neural_mp.data.option_checks import (
    check_finite_number,
    check_one_of,
    check_whole_number,
    check_whole_numbers,
)
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, DataError, MetricError
from neural_mp.metrics import METRICS as OUR_METRICS
from neural_mp.metrics.predictions import convert_to_array
from neural_mp.util.pytree import convert_to_numpy

#: Dataset options without effect → reason.
_IGNORED = {
    "filter": "all samples of the dataset are used",
    "num_cores": "files are read one after the other",
}


def split_words(option: str, value: object) -> list[Any]:
    """Return a list as is, `"a, b"` and `"a b"` as lists of words, other values as one item."""
    if isinstance(value, str):
        items = value.replace(",", " ").split()
        if not items:
            raise ConfigurationError(f"{option} must hold at least one value, got {value!r}")
        return list(items)
    return list(value) if isinstance(value, Sequence) else [value]


def parse_numbers(option: str, value: object) -> tuple[float, ...]:
    """Parse one or several numbers, also written as `"1.0, 2.0"` or `"1.0 2.0"`."""
    values = tuple(
        check_finite_number(option, _parse_number(item)) for item in split_words(option, value)
    )
    if not values:
        raise ConfigurationError(f"{option} must hold at least one value, got {value!r}")
    return values


def parse_sizes(option: str, value: object) -> tuple[int, ...]:
    """Parse integers from 1, also written as `"3, 224, 224"`."""
    return check_whole_numbers(option, [*map(_parse_number, split_words(option, value))], minimum=1)


def _parse_number(item: object) -> object:
    if not isinstance(item, str):
        return item
    for kind in (int, float):
        try:
            return kind(item)
        except ValueError:
            continue
    return item


def split_parts(values: object) -> list[Any]:
    """Return the arrays in a list, tuple or dict; other values and lists of numbers as one item."""
    if isinstance(values, Mapping):
        return list(values.values())
    if isinstance(values, list | tuple) and any(getattr(v, "ndim", 0) > 0 for v in values):
        return list(values)
    return [values]


def stack_as_one(values: object, what: str) -> np.ndarray:
    """Return `values` as one array; several arrays are stacked along a new first axis.

    `what` is `"predictions"` or `"labels"`, for messages.
    """
    pieces = split_parts(values)
    if len(pieces) == 1:
        return convert_to_array(pieces[0], what)
    shapes = [np.shape(piece) for piece in pieces]
    if len(set(shapes)) != 1:
        raise MetricError(
            f"the {what} must be one array, got {len(pieces)} arrays of shapes {shapes[:4]}; "
            f"select one in a postprocess transform or a metric of your own"
        )
    return np.stack([convert_to_array(piece, what) for piece in pieces])


def predictions_and_labels(transform: object, sample: object) -> tuple[Any, Any]:
    """Return the parts of the sample of a postprocess transform."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(
            f"{type(transform).__name__}: a sample must be (predictions, labels), got "
            f"{type(sample).__name__}"
        )
    return sample[0], sample[1]


def to_text(value: Any) -> str:
    """Return a string given as such, as UTF-8 bytes or as an array of one; a number as digits."""
    if not isinstance(value, str | bytes):
        array = convert_to_numpy(value)
        value = array.item() if array.size == 1 else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


Factory = TypeVar("Factory", bound=Callable[..., Any])
#: Validates a value by the name of its option, and returns the normalized value.
Check = Callable[[str, Any], Any]
POSITIVE: Check = partial(check_whole_number, minimum=1)
NON_NEGATIVE: Check = partial(check_whole_number, minimum=0)


def check_choice(*choices: str) -> Check:
    """Return a check for one of some words."""
    return lambda option, value: check_one_of(option, value, choices)


def check_parsed(parse: Check, rule: str, test: Callable[[Any], bool]) -> Check:
    """Return a check that parses a value, then tests the result against a rule."""

    def parse_and_test(name: str, value: Any) -> Any:
        result = parse(name, value)
        if not test(result):
            raise ConfigurationError(f"{name} must be {rule}, got {value!r}")
        return result

    return parse_and_test


def check_optional(check: Check) -> Check:
    """Return a check that also accepts None."""
    return lambda name, value: None if value is None else check(name, value)


above_zero = check_parsed(check_finite_number, "above 0", lambda found: found > 0)


def option(check: Check, default: Any = MISSING, *, kw_only: bool = False) -> Any:
    """Return a field of `Options` that `check` validates and normalizes."""
    return field(default=default, kw_only=kw_only, metadata={"check": check})


@dataclass(frozen=True)
class Options:
    """Base of frozen dataclasses whose fields are options, validated when created."""

    #: Registered name, for messages.
    label: ClassVar[str] = ""

    def __post_init__(self) -> None:
        for item in fields(self):
            if "check" in item.metadata:
                name = f"{self.label}: {item.name}"
                self.set_fields(
                    **{item.name: item.metadata["check"](name, getattr(self, item.name))}
                )
        beyond = getattr(super(), "__post_init__", None)
        if beyond is not None:
            beyond()

    def set_fields(self, **values: Any) -> None:
        """Set fields during creation."""
        for name, value in values.items():
            object.__setattr__(self, name, value)


FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")


class ShortRegistry(Registry):
    """A registry in which a bare value sets the first option: `Resize: 256`."""

    def build(self, name: str, options: Any = None) -> Any:
        """Call the factory registered as `name` with `options`, or with a bare value."""
        if options is not None and not isinstance(options, Mapping):
            parameters = [*inspect.signature(self.find_factory(name)).parameters]
            if parameters:
                options = {parameters[0]: options}
        return super().build(name, options)


def _build_registries(kind: str, ours: Registry) -> Mapping[str | None, Registry]:
    shared = ShortRegistry(kind, beyond=ours)
    return {None: shared, **{name: ShortRegistry(kind, beyond=shared) for name in FRAMEWORKS}}


#: Framework → its names; None → names common to all.
DATASETS = _build_registries("dataset", OUR_DATASETS)
TRANSFORMS = _build_registries("transform", OUR_TRANSFORMS)
METRICS = _build_registries("metric", OUR_METRICS)


def register_for(
    registries: Mapping[str | None, Registry], name: str, *frameworks: str
) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a factory for some frameworks; by default for all."""

    def register_factory(factory: Factory) -> Factory:
        _set_label(factory, name)
        for framework in frameworks or (None,):
            registries[framework].register(name)(factory)
        return factory

    return register_factory


def _set_label(factory: Callable[..., Any], name: str) -> None:
    if inspect.isclass(factory) and issubclass(factory, Options):
        factory.label = name


def dataset(
    name: str,
    *frameworks: str,
    ignored: Sequence[str] = ("filter",),
    needs: Callable[[str], object] | None = None,
) -> Callable[[Factory], Factory]:
    """Return a decorator that registers a dataset.

    Args:
        name: name of the dataset.
        *frameworks: frameworks whose files may use the name; default: all.
        ignored: further options, without effect.
        needs: imports a package, by the name of its user, before the dataset is created.
    """

    def register_factory(factory: Factory) -> Factory:
        _set_label(factory, name)

        @wraps(factory)
        def make_dataset(*arguments: object, **options: object) -> Any:
            for option in ignored:
                if options.pop(option, None) is not None:
                    message = f"dataset {name!r}: {option} is ignored: {_IGNORED[option]}"
                    warnings.warn(message, IgnoredSettingWarning, stacklevel=2)
            if needs is not None:
                needs(f"dataset {name!r}")
            return factory(*arguments, **options)

        signature = inspect.signature(factory)
        unused = [
            inspect.Parameter(o, inspect.Parameter.KEYWORD_ONLY, default=None) for o in ignored
        ]
        parameters = [*signature.parameters.values(), *unused]
        vars(make_dataset)["__signature__"] = signature.replace(parameters=parameters)
        register_for(DATASETS, name, *frameworks)(make_dataset)
        return factory

    return register_factory
