"""The registries of names, one for every framework, and one for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from neural_mp.data import DATASETS as OUR_DATASETS
from neural_mp.data import TRANSFORMS as OUR_TRANSFORMS
from neural_mp.data.registry import Registry
from neural_mp.metrics import METRICS as OUR_METRICS

Factory = TypeVar("Factory", bound=Callable[..., Any])

FRAMEWORKS = ("pytorch", "tensorflow", "onnxrt")


def _registries(kind: str, ours: Registry) -> Mapping[str | None, Registry]:
    shared = Registry(kind, beyond=ours)
    return {None: shared, **{name: Registry(kind, beyond=shared) for name in FRAMEWORKS}}


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
