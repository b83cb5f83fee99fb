"""`Benchmark` of their version 1."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc import benchmark
from neural_mp.compat.inc.given import DataLoader, metric_of, named_dataset, postprocess_of
from neural_mp.compat.inc.model import runnable
from neural_mp.compat.inc.settings import settings_of


class Benchmark:
    """Measures accuracy or speed of a model.

    Args:
        conf_fname_or_obj: the path of a YAML file, settings by attribute, or None.

    Attributes:
        model: the framework's object, a path, a `common.Model` or a result.
        b_dataloader: what it is run on; by default what the file names.
        b_func: a function of the model that is timed, or that gives the accuracy.
        metric, postprocess: as of `Quantization`.
        results: mode → what was found.
    """

    def __init__(self, conf_fname_or_obj: Any = None) -> None:
        self.settings = settings_of(conf_fname_or_obj)
        self.model: Any = self.settings.model.name
        self.b_dataloader: Any = None
        self.b_func: Any = None
        self.metric: Any = None
        self.postprocess: Any = None
        self.results: dict[str, Any] = {}

    def dataset(self, name: str, *shape: Any, **options: Any) -> Any:
        """A dataset by its name."""
        if shape:
            options["shape"] = shape[0]
        return named_dataset(name, options, self.settings.model.framework)

    def dataloader(self, dataset: Any, batch_size: int = 1, **options: Any) -> DataLoader:
        """Batches of a dataset."""
        return DataLoader(dataset, batch_size, **options)

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

    def __repr__(self) -> str:
        return "Benchmark"
