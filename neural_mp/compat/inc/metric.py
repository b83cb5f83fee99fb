"""`metric`: what measures accuracy, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from neural_mp.compat.inc.components import vocabulary
from neural_mp.compat.inc.import_aliases import looked_up
from neural_mp.compat.inc.user_objects import Metric
from neural_mp.config.inc_dialect import FRAMEWORKS
from neural_mp.data.registry import Registry
from neural_mp.metrics import METRICS as OUR_METRICS

#: Names of classes of theirs → the name of the metric.
_CLASSES: Mapping[str, str] = {
    "TensorflowTopK": "topk",
    "GeneralTopK": "topk",
    "COCOmAPv2": "COCOmAPv2",
    "TensorflowCOCOMAP": "COCOmAP",
    "SquadF1": "SquadF1",
    "Accuracy": "Accuracy",
}


class Names(Mapping[str, Any]):
    """What one can ask for by name: `METRICS("tensorflow")["topk"](k=1)`.

    Args:
        registry: where it is looked up.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def __getitem__(self, name: str) -> Any:
        return self._registry.find(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._registry)

    def __len__(self) -> int:
        return len(self._registry)


def framework_of(word: str | None) -> str | None:
    """Our name of a framework of theirs; None where it is none of ours."""
    return FRAMEWORKS.get(str(word).lower())


def METRICS(framework: str) -> Names:  # noqa: N802  # their name
    """The metrics of a framework."""
    return Names(vocabulary(framework_of(framework)).metrics or OUR_METRICS)


class BaseMetric:
    """What metrics of their scripts derive from.

    Args:
        metric: taken for their sake.
        single_output: taken for their sake.
        hvd: taken for their sake.
    """

    def __init__(
        self, metric: object = None, single_output: bool = False, hvd: object = None
    ) -> None:
        self.metric = metric

    def update(self, preds: Any, labels: Any = None, sample_weight: Any = None) -> None:
        """Take in one batch."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def result(self) -> float:
        """The value."""
        raise NotImplementedError


__all__ = ["METRICS", "BaseMetric", "Metric", "Names", "framework_of"]


def __getattr__(name: str) -> Any:
    if name in _CLASSES:
        for framework in (None, "tensorflow", "onnxrt", "pytorch"):
            metrics = vocabulary(framework).metrics or OUR_METRICS
            if _CLASSES[name] in metrics:
                return metrics.find(_CLASSES[name])
    return looked_up(__name__, name, globals())
