"""What the sections of the page ask about a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from neural_mp.core.graph import OpGraph
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.core.trial import Trial
from neural_mp.runs.record import RunEnd, RunRecord
from neural_mp.runs.report import Report
from neural_mp.tuning.sensitivity import Sensitivity, sensitivities


@dataclass(frozen=True)
class View:
    """A record, and what follows from it.

    Attributes:
        record: what was kept of the run.
    """

    record: RunRecord

    @property
    def graph(self) -> OpGraph:
        """The model's ops."""
        return self.record.setup.graph

    @property
    def ending(self) -> RunEnd | None:
        """How the run ended; None for one that was killed, or goes on."""
        return self.record.ending

    @property
    def report(self) -> Report | None:
        """The figures of a run that ended."""
        return None if self.ending is None else self.ending.report

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """The trials, each with its latest figures."""
        latest = self.ending.finalists if self.ending else ()
        newer = {trial.number: trial for trial in latest}
        return tuple(newer.get(trial.number, trial) for trial in self.record.trials)

    @cached_property
    def drawn(self) -> tuple[Trial, ...]:
        """The trials that have a place in a chart: those with an accuracy that is a number."""
        return tuple(t for t in self.trials if t.accuracy is not None and isfinite(t.accuracy))

    @cached_property
    def best(self) -> Trial | None:
        """The trial that became the result; of a run that did not end, the fastest so far."""
        if self.ending is not None:
            return next((t for t in self.trials if t.number == self.ending.chosen), None)
        met = [trial for trial in self.trials if trial.met]
        return min(met, key=_time, default=None)

    @property
    def subject(self) -> str:
        """What the page is about, in words."""
        return "the result" if self.ending else "the best trial so far"

    @cached_property
    def flow(self) -> QuantizationFlow | None:
        """What follows from the result's plan, or from the best so far; None without either."""
        if self.ending is not None:
            return self.record.setup.followed(self.ending.plan)
        return None if self.best is None else self.record.setup.followed(self.best.plan)

    @cached_property
    def runs_in(self) -> Mapping[str, Precision]:
        """Op → what it runs in, in the result or the best so far; FP32 without either."""
        if self.flow is None:
            return {op.name: Precision.FP32 for op in self.graph}
        return self.flow.effective

    @cached_property
    def counts(self) -> dict[Precision, int]:
        """Precision → how many ops run in it, those that occur only."""
        found = Counter(self.runs_in.values())
        return {precision: found[precision] for precision in Precision if found[precision]}

    @cached_property
    def decided(self) -> frozenset[str]:
        """The ops that a plan decides on."""
        return frozenset(self.record.setup.tunable_ops)

    @cached_property
    def plan(self) -> PrecisionPlan:
        """Of the result, or of the best trial so far; empty without either."""
        if self.ending is not None:
            return self.ending.plan
        return self.best.plan if self.best else PrecisionPlan()

    @cached_property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """The decisions, those that do most harm first."""
        return tuple(sensitivities(self.record, self.plan))

    @cached_property
    def arriving(self) -> dict[str, float]:
        """Tensor or op → noise at the outputs, of those that were measured."""
        found = {row.name: arriving(row) for row in self.sensitivities}
        return {name: noise for name, noise in found.items() if noise is not None}

    @property
    def baseline_accuracy(self) -> float | None:
        """Of the FP32 model; None where none was evaluated."""
        if self.report is not None:
            return self.report.baseline_accuracy
        return (self.record.baseline or {}).get("accuracy")

    @property
    def target(self) -> float | None:
        """The worst accuracy that is accepted; None where there is none, or it is not known."""
        if self.report is not None:
            return self.report.target
        return (self.record.baseline or {}).get("target")

    @property
    def metric(self) -> str:
        """What the accuracy is called."""
        return (self.report.metric if self.report else "") or "accuracy"

    @cached_property
    def higher_is_better(self) -> bool:
        """Whether a larger accuracy is the better one; of a killed run, as its trials tell."""
        if self.report is not None:
            return self.report.higher_is_better
        base = self.baseline_accuracy
        for trial in self.drawn:
            if base is not None and trial.loss and trial.accuracy not in (None, base):
                return (trial.accuracy < base) == (trial.loss > 0)
        return True

    def type_of(self, name: str) -> str:
        """The type of an op, or `input`."""
        return self.graph[name].type if name in self.graph else "input"


def _time(trial: Trial) -> float:
    """What a trial takes as a share of FP32's, by the first figure that there is."""
    for name in ("relative_latency", "relative_footprint", "relative_modelsize"):
        if name in trial.objectives:
            return trial.objectives[name]
    return float("inf")


def arriving(row: Sensitivity) -> float | None:
    """Noise at the outputs, after repair, where it was measured."""
    if row.repaired_output_noise is not None:
        return row.repaired_output_noise
    return row.output_noise
