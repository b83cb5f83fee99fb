"""Data model of the page: values derived from the record of a run."""

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
from neural_mp.runs.report import Report, RunEnd, RunRecord
from neural_mp.space import explain_int8_choice
from neural_mp.tuning.measurement.sensitivity import Sensitivity, sensitivity_report


@dataclass(frozen=True)
class View:
    """View of a run record with derived values."""

    record: RunRecord

    @property
    def graph(self) -> OpGraph:
        """Graph of the model."""
        return self.record.setup.graph

    @property
    def run_end(self) -> RunEnd | None:
        """End of the run; None if it was killed or is still running."""
        return self.record.ending

    @property
    def report(self) -> Report | None:
        """Report of a finished run; else None."""
        return None if self.run_end is None else self.run_end.report

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """Trials, each with its latest measurements."""
        newer = {trial.number: trial for trial in (self.run_end.finalists if self.run_end else ())}
        return tuple(newer.get(trial.number, trial) for trial in self.record.trials)

    @cached_property
    def drawable_trials(self) -> tuple[Trial, ...]:
        """Trials with a finite accuracy, which charts can show."""
        return tuple(t for t in self.trials if t.accuracy is not None and isfinite(t.accuracy))

    @cached_property
    def best_trial(self) -> Trial | None:
        """Trial of the result; for an unfinished run, the fastest so far."""
        if self.run_end is not None:
            return next((t for t in self.trials if t.number == self.run_end.chosen), None)
        met = [trial for trial in self.trials if trial.met]
        return min(met, key=_get_first_objective, default=None)

    @property
    def page_subject(self) -> str:
        """Subject of the page as text."""
        return "the result" if self.run_end else "the best trial so far"

    @cached_property
    def flow(self) -> QuantizationFlow | None:
        """Quantization flow of the result or the best trial so far; None without either."""
        if self.run_end is not None:
            return self.record.setup.follow_plan(self.run_end.plan)
        return (
            None if self.best_trial is None else self.record.setup.follow_plan(self.best_trial.plan)
        )

    @property
    def source(self) -> str:
        """Precision of the given model as a name, such as `FP32`."""
        return self.graph.source_name

    @cached_property
    def effective(self) -> Mapping[str, Precision]:
        """Op → precision in the plan of the result or of the best trial so far; else FP32."""
        if self.flow is None:
            return {op.name: Precision.FP32 for op in self.graph}
        return self.flow.effective

    @cached_property
    def runs_in(self) -> Mapping[str, Precision]:
        """Op → precision in which the op is executed; see `OpGraph.executed`."""
        return self.graph.executed(self.effective)

    @cached_property
    def counts(self) -> dict[Precision, int]:
        """Precision → number of ops, without zeros."""
        counter = Counter(self.runs_in.values())
        return {precision: counter[precision] for precision in Precision if counter[precision]}

    @cached_property
    def tunable_ops(self) -> frozenset[str]:
        """The tunable ops."""
        return frozenset(self.record.setup.tunable_ops)

    @cached_property
    def plan(self) -> PrecisionPlan:
        """Plan of the result or the best trial so far; else empty."""
        if self.run_end is not None:
            return self.run_end.plan
        return self.best_trial.plan if self.best_trial else PrecisionPlan()

    def explain_int8_op(self, op: str) -> str:
        """Return why an op runs in INT8 or not under `plan`; empty without a plan."""
        if self.flow is None:
            return ""
        setup = self.record.setup
        return explain_int8_choice(setup.graph, setup.capabilities, self.plan, self.flow, op)

    @cached_property
    def sensitivities(self) -> tuple[Sensitivity, ...]:
        """Sensitivities of the decisions, highest degradation first."""
        return tuple(sensitivity_report(self.record, self.plan))

    @cached_property
    def output_nsr(self) -> dict[str, float]:
        """Tensor or op → output noise, if measured."""
        values = {row.name: row.output_nsr for row in self.sensitivities}
        return {name: noise for name, noise in values.items() if noise is not None}

    @property
    def baseline_accuracy(self) -> float | None:
        """Accuracy of the given model; None if not evaluated."""
        if self.report is not None:
            return self.report.baseline_accuracy
        return (self.record.baseline or {}).get("accuracy")

    @property
    def target(self) -> float | None:
        """Worst accepted accuracy; None if unset or unknown."""
        if self.report is not None:
            return self.report.target
        return (self.record.baseline or {}).get("target")

    @property
    def metric(self) -> str:
        """Name of the accuracy metric."""
        return (self.report.metric if self.report else "") or "accuracy"

    @cached_property
    def higher_is_better(self) -> bool:
        """Whether higher accuracy is better; for a killed run, derived from its trials."""
        if self.report is not None:
            return self.report.higher_is_better
        base = self.baseline_accuracy
        for trial in self.drawable_trials:
            if base is not None and trial.loss and trial.accuracy not in (None, base):
                return (trial.accuracy < base) == (trial.loss > 0)
        return True


def _get_first_objective(trial: Trial) -> float:
    """Return the first available objective of a trial as a fraction of FP32."""
    for name in ("relative_latency", "relative_footprint", "relative_modelsize"):
        if name in trial.objectives:
            return trial.objectives[name]
    return float("inf")
