"""`metric`: accuracy metrics by INC's names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.user_objects import Metric
from neural_mp.config.inc_dialect import FRAMEWORKS
from neural_mp.data.registry import Registry
from neural_mp.metrics import METRICS as OUR_METRICS

#: INC class names → name of the metric.
_CLASSES: Mapping[str, str] = {
    "TensorflowTopK": "topk",
    "GeneralTopK": "topk",
    "COCOmAPv2": "COCOmAPv2",
    "TensorflowCOCOMAP": "COCOmAP",
    "SquadF1": "SquadF1",
    "Accuracy": "Accuracy",
}


class Names(Mapping[str, Any]):
    """Mapping of registered names: `METRICS("tensorflow")["topk"](k=1)`.

    Args:
        registry: the registry to read.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        return self._registry.find_factory(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)


def translate_framework_name(name: str | None) -> str | None:
    """Return our name of an INC framework; None if not supported."""
    return FRAMEWORKS.get(str(name).lower())


def METRICS(framework: str) -> Names:  # noqa: N802  # their name
    """Return the metrics of a framework."""
    return Names(load_vocabulary(translate_framework_name(framework)).metrics or OUR_METRICS)


class BaseMetric:
    """Base class of metrics in scripts.

    Args:
        metric: kept as an attribute.
        single_output: ignored.
        hvd: ignored.
    """

    def __init__(
        self, metric: object = None, single_output: bool = False, hvd: object = None
    ) -> None:
        self.metric = metric

    def update(self, preds: object, labels: object = None, sample_weight: object = None) -> None:
        """Update with one batch."""
        raise NotImplementedError

    def reset(self) -> None:
        """Reset the state."""
        raise NotImplementedError

    def result(self) -> float:
        """Return the value."""
        raise NotImplementedError


__all__ = ["METRICS", "BaseMetric", "Metric", "Names", "translate_framework_name"]


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        for framework in (None, "tensorflow", "onnxrt", "pytorch"):
            metrics = load_vocabulary(framework).metrics or OUR_METRICS
            if _CLASSES[name] in metrics:
                return metrics.find_factory(_CLASSES[name])
    return make_absent_getter(globals())(name)
