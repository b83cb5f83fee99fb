"""`Benchmark` of their version 1."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc import benchmark
from neural_mp.compat.inc.experimental.configured import Configured
from neural_mp.compat.inc.model import runnable
from neural_mp.compat.inc.user_objects import metric_of, postprocess_of


class Benchmark(Configured):
    """Measures accuracy or speed of a model.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, a `common.Model` or a result.
        b_dataloader: what it is run on; by default what the file names.
        b_func: a function of the model that is timed, or that gives the accuracy.
        results: mode → what was found.
    """

    def __init__(self, conf_fname_or_obj: Any = None) -> None:
        super().__init__(conf_fname_or_obj)
        self.b_dataloader: Any = None
        self.b_func: Any = None
        self.results: dict[str, Any] = {}

    def fit(self, mode: str = "performance") -> dict[str, Any]:
        """Measure.

        Args:
            mode: `performance` or `accuracy`.

        Returns:
            What was found; see `neural_mp.compat.inc.benchmark.Performance`.

        Raises:
            NeuralMPError: there is no model or no data, or the mode is neither.
        """
        metric = metric_of(self.metric, self.settings.model.framework)
        found = benchmark.measured(
            self.settings,
            runnable(self.model),
            mode,
            self.b_dataloader,
            self.b_func,
            metric,
            postprocess_of(self.postprocess),
        )
        self.results[mode] = found
        return self.results

    __call__ = fit
