"""The registries of names, one for every framework, and one for all of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from neural_mp.data import DATASETS as OUR_DATASETS
from neural_mp.data import TRANSFORMS as OUR_TRANSFORMS
from neural_mp.data.registry import Registry
from neural_mp.metrics import METRICS as OUR_METRICS

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
