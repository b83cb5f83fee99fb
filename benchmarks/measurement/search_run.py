"""One strategy on one model: tune it, and time what came of it beside FP32 and all INT8."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.measurement.search_data import BATCH, Digits
from benchmarks.nets.search_nets import net_in
from benchmarks.real.case import Accuracy
from neural_mp import ExitPolicy, MixedPrecision, common
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision
from neural_mp.profiling import time_interleaved_medians
from neural_mp.tuning.listener import Listener

#: Of a run in one loop with all others.
WARMUP, ITERATIONS = 3, 51


@dataclass
class Row:
    """What is said of one strategy on one model; None where it is not known.

    Attributes:
        framework, model, strategy: what was run.
        evaluations: full passes over the evaluation data, the FP32 baseline included.
        trials: plans tried.
        seconds: of the whole run: loading, calibration, search, measurement.
        searching: of the search alone.
        baseline, accuracy: of FP32 and of the result.
        met: whether the result met the target; if not, it is the FP32 model.
        kept, able: ops in INT8, and those that are where no accuracy is asked for.
        speedup: over FP32.
        share: the speed-up as a share of that of all INT8.
        error: why there is no result.
    """

    framework: str
    model: str
    strategy: str
    evaluations: int | None = None
    trials: int | None = None
    seconds: float | None = None
    searching: float | None = None
    baseline: float | None = None
    accuracy: float | None = None
    met: bool | None = None
    kept: int | None = None
    able: int | None = None
    speedup: float | None = None
    share: float | None = None
    error: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Case:
    """One model of one framework.

    Attributes:
        framework, model: their names.
        precisions: what may be used beside FP32.
        max_trials: the most that a strategy may try.
        workspace: a folder for what runs keep.
    """

    framework: str
    model: str
    precisions: str
    max_trials: int
    workspace: Path
    rows: list[Row] = field(default_factory=list)
    _results: list[tuple[Row, OptimizedModel]] = field(default_factory=list)

    @cached_property
    def source(self) -> Any:
        """What a user would give."""
        return net_in(self.framework, self.model)

    def loader(self, split: str) -> common.DataLoader:
        """Return the batches of a part of the data."""
        return common.DataLoader(Digits(split, self.framework == "tensorflow"), batch_size=BATCH)

    def tuned(self, strategy: str, policy: ExitPolicy, **options: Any) -> OptimizedModel:
        """Tune with one strategy."""
        converter = MixedPrecision(**options)
        converter.model = self.source
        converter.precisions = self.precisions
        converter.strategy = strategy
        converter.exit_policy = policy
        converter.metric = Accuracy()
        converter.eval_dataloader = self.loader("test")
        converter.calib_dataloader = self.loader("train")
        converter.workspace = self.workspace / f"{self.framework}-{self.model}-{strategy}"
        converter.listener = Listener()  # the progress of all runs is shown instead
        return converter()

    @cached_property
    def fastest(self) -> OptimizedModel:
        """All ops as low as they can, whatever the accuracy."""
        return self.tuned("basic", ExitPolicy(performance_only=True))

    def run(self, strategy: str) -> Row:
        """Tune with one strategy; what fails is said in its row."""
        row = Row(self.framework, self.model, strategy)
        self.rows.append(row)
        with _errors_in(row):
            row.able = int8_ops(self.fastest)
            started = time.perf_counter()
            result = self.tuned(strategy, ExitPolicy(max_trials=self.max_trials))
            row.seconds = time.perf_counter() - started
            report = result.report
            row.evaluations, row.trials = report.evaluations, len(result.trials)
            row.searching = report.seconds.get("search")
            row.baseline, row.accuracy = report.baseline_accuracy, report.accuracy
            row.met, row.kept = result.met, int8_ops(result)
            self._results.append((row, result))
        return row

    def accuracy_of_fastest(self) -> float:
        """What all INT8 comes to."""
        metric = Accuracy()
        for images, labels in self.loader("test"):
            metric.update(self.fastest(images), labels)
        return metric.result()

    def time_all(self) -> None:
        """Fill in the speed-ups, all of them taken in one loop."""
        timed = [(row, result) for row, result in self._results if row.met]
        for row in self.rows:
            if row.met is False:  # then it is the FP32 model
                row.speedup = 1.0
        try:
            self._time(timed)
        except Exception as error:  # noqa: BLE001 – what was found stands, without its speed
            for row, _ in timed:
                row.error = f"not timed: {error}"

    def _time(self, timed: list[tuple[Row, OptimizedModel]]) -> None:
        if not timed:
            return
        batch, _ = next(iter(self.loader("test")))
        adaptor = self.fastest.adaptor
        baseline = adaptor.load(self.source, example=batch)
        models = {result.plan: result for _, result in timed}  # those of one plan run once
        models.setdefault(self.fastest.plan, self.fastest)
        runs = [
            partial(adaptor.predict, baseline, batch),
            *(partial(result, batch) for result in models.values()),
        ]
        float_seconds, *medians = time_interleaved_medians(
            runs, warmup=WARMUP, iterations=ITERATIONS
        )
        seconds = dict(zip(models, medians, strict=True))
        for row, result in timed:
            row.speedup = float_seconds / seconds[result.plan]
            row.share = seconds[self.fastest.plan] / seconds[result.plan]


def int8_ops(result: OptimizedModel) -> int:
    return sum(config.precision is Precision.INT8 for config in result.plan.values())


@contextmanager
def _errors_in(row: Row) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 – whatever a strategy does, the others go on
        row.error = f"{type(error).__name__}: {error}"
