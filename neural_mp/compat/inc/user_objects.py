"""Loaders, metrics and postprocesses that scripts give, made into what the tuning loop takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from neural_mp.common import DataLoader as OurDataLoader
from neural_mp.compat.inc.components import vocabulary
from neural_mp.data import build_dataset
from neural_mp.errors import ConfigurationError
from neural_mp.metrics import METRICS, build_metric


class DataLoader(OurDataLoader):
    """`common.DataLoader`: batches of a dataset.

    Args:
        dataset: anything with `__getitem__` and `__len__`, or any iterable.
        batch_size: samples a batch.
        collate_fn: list of samples → batch.
        last_batch: `rollover` or `discard`.
        sampler, batch_sampler, num_workers, pin_memory, distributed: taken for their sake; samples
            are read one after the other, in one process.
        shuffle: whether samples are drawn in a random order.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        last_batch: str = "rollover",
        sampler: object = None,
        batch_sampler: object = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        shuffle: bool = False,
        distributed: bool = False,
    ) -> None:
        super().__init__(dataset, batch_size, collate_fn, shuffle, last_batch)


class Later:
    """A class and the options it is to be made with: `common.Metric`, `common.Postprocess`.

    Args:
        kind: the class, or a function that makes an object.
        name: taken for their sake.
        **options: what it is made with.
    """

    def __init__(self, kind: Callable[..., Any], name: str = "user", **options: object) -> None:
        self.kind, self.name, self.options = kind, name, options

    def made(self) -> Any:
        """The object."""
        return self.kind(**self.options)


class Metric(Later):
    """A metric by its class, or, as their version 2 has it, by the name of one: `name="topk"`."""

    def __init__(
        self, metric_cls: Any = None, name: str = "user_metric", **options: object
    ) -> None:
        super().__init__(metric_cls, name, **options)

    def made(self) -> Any:
        """The metric; of a name, that of the vocabulary."""
        if self.kind is not None:
            return super().made()
        return named_metric(self.name, self.options)


class Postprocess(Later):
    """A postprocess by its class: its objects take `(predictions, labels)`."""

    def __init__(
        self, postprocess_cls: Any, name: str = "user_postprocess", **options: object
    ) -> None:
        super().__init__(postprocess_cls, name, **options)


def named_metric(name: str, options: Any, framework: str | None = None) -> Any:
    """The metric that a name of theirs stands for.

    Raises:
        ConfigurationError: there is none, or an option is not its own.
    """
    return build_metric(name, options, vocabulary(framework).metrics or METRICS)


def metric_of(given: object, framework: str | None = None) -> Any:
    """A metric as the tuning loop takes it, or several by name, which each have to meet the target.

    Args:
        given: an object with update, reset and result; a class of such; a `Metric`; a dict of
            names with their options, as in YAML.
        framework: whose names these are.

    Raises:
        ConfigurationError: it is none of these.
    """
    if given is None:
        return None
    if isinstance(given, Later):
        return given.made()
    if isinstance(given, Mapping):
        named = {key: value for key, value in given.items() if key not in _NO_METRICS}
        made = {key: named_metric(key, value, framework) for key, value in named.items()}
        if len(made) == 1:
            return next(iter(made.values()))
        return {**made, **{key: given[key] for key in _NO_METRICS if key in given}}
    return given() if inspect.isclass(given) else given


#: What stands beside the metrics of a dict.
_NO_METRICS = ("weight", "higher_is_better")


def postprocess_of(given: object) -> Callable[[Any], Any] | None:
    """A postprocess as a function of `(predictions, labels)`.

    Raises:
        ConfigurationError: it cannot be called.
    """
    made = given.made() if isinstance(given, Later) else given
    made = made() if inspect.isclass(made) else made
    if made is not None and not callable(made):
        raise ConfigurationError(f"postprocess must take (predictions, labels), got {given!r}")
    found: Callable[[Any], Any] | None = made
    return found


def named_dataset(name: str, options: Mapping[str, Any], framework: str | None = None) -> Any:
    """The dataset that a name of theirs stands for.

    Raises:
        ConfigurationError: there is none, or an option is not its own.
    """
    return build_dataset({name: dict(options)}, vocabulary(framework))


def tensor_names(given: Any) -> list[str] | None:
    """Names of tensors as a list; None where none are given."""
    if not given:
        return None
    words = given.split(",") if isinstance(given, str) else list(given)
    return [str(word).strip() for word in words]
