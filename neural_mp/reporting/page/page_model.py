"""Data model of the page: values derived from the record of a run, and the data of its script."""

from __future__ import annotations

import base64
import gzip
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import isfinite
from typing import Any

from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.op_timings import MAX_GAIN
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.core.trial import Trial
from neural_mp.errors import visible
from neural_mp.reporting.page.map_layout import map_levels
from neural_mp.runs.report import Report, RunEnd, RunRecord
from neural_mp.space import explain_int8_choice
from neural_mp.targets import Widths, words_of
from neural_mp.tuning.measurement.sensitivity import Sensitivity, sensitivity_report
from neural_mp.util.html import Element, create_element, create_raw_element

#: Letter of each precision, for a compact encoding of plans.
LETTERS: Mapping[Precision, str] = {
    Precision.INT2: "2",
    Precision.INT3: "3",
    Precision.INT4: "4",
    Precision.INT8: "8",
    Precision.INT16: "w",
    Precision.BF16: "b",
    Precision.FP16: "h",
    Precision.FP32: ".",
}
#: Letter of ops of an accelerator with 16 bits in weight and activations.
WIDE_LETTER = "W"
#: Minimum number of characters for compression.
_LARGE = 150_000
#: Maximum number of characters of a plan in a data link, which needs no script.
_SMALL_PLAN = 60_000
#: Maximum number of ops over all stored plans; the best trials come first.
_MOST_PLANS = 1_000_000


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


def create_data_element(view: View) -> Element:
    """Return the data as a non-executable script element."""
    text = json.dumps(
        _build_page_data(view), separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    if len(text) <= _LARGE:
        return create_raw_element(
            "script", text.replace("<", "\\u003c"), type="application/json", id="data"
        )
    packed = base64.b64encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return create_raw_element("script", packed, type="text/plain", id="data", data_packed=True)


def plan_yaml(view: View) -> str | None:
    """Return the plan of the result, or of the best trial so far, as YAML for replay."""
    if view.flow is None:
        return None
    figures = None if view.report is None else view.report.accelerator
    plan = replace(
        view.plan,
        source_precisions=view.graph.source_precisions,
        target="" if figures is None else figures.name,
    )
    return plan.to_yaml(framework=view.record.setup.framework)


def plan_link(view: View) -> Element | None:
    """Return a download link of the plan; None without a plan."""
    plan = plan_yaml(view)
    if plan is None:
        return None
    packed = base64.b64encode(plan.encode()).decode()
    address = f"data:text/yaml;base64,{packed}" if len(plan) <= _SMALL_PLAN else None
    return create_element(
        "a", "Plan (YAML)", class_="button main", id="plan", download="plan.yaml", href=address
    )


def _build_page_data(view: View) -> dict[str, Any]:
    levels = map_levels(view.graph)
    reasons: dict[str, int] = {}
    types: dict[str, int] = {}
    plan = plan_yaml(view)
    return {
        "ops": [_list_op_fields(view, op, types, reasons) for op in view.graph],
        "types": [visible(kind) for kind in types],
        "why": [visible(reason) for reason in reasons],
        "result": precision_letters(view, view.plan, view.runs_in),
        "plans": _encode_plans(view),
        "best": None if view.best_trial is None else view.best_trial.number,
        "most_gain": MAX_GAIN,
        "source": view.source,
        "levels": [level.level_document() for level in levels],
        "plan": plan if plan is not None and len(plan) > _SMALL_PLAN else None,
    }


def precision_letters(
    view: View, plan: Mapping[str, OpConfig], runs_in: Mapping[str, Precision]
) -> str:
    """Encode the precision of each op as one letter."""

    def letter(op: str) -> str:
        precision = runs_in.get(op, Precision.FP32)
        is_wide = (
            precision is Precision.INT16 and Widths.from_config(plan.get(op, FP32)) is Widths.W16A16
        )
        return WIDE_LETTER if is_wide else LETTERS[precision]

    return "".join(letter(op.name) for op in view.graph)


def _list_op_fields(
    view: View, op: Op, types: dict[str, int], reasons: dict[str, int]
) -> list[Any]:
    """Return the fields of an op in the order that the script expects."""
    record = view.record
    capability = record.setup.capabilities.get(op.name)
    why = capability.reasons if capability else {}
    times = record.measured.times.ops.get(op.name, {})
    ending = view.run_end
    return [
        visible(op.name),
        types.setdefault(op.type, len(types)),
        {LETTERS[p]: reasons.setdefault(reason, len(reasons)) for p, reason in why.items()},
        _round_finite(record.observations.nsr.get(op.name)),
        _round_finite(view.output_nsr.get(op.name)),
        {LETTERS[p]: _to_microseconds(value) for p, value in times.items()},
        _to_microseconds(ending.baseline_times.get(op.name)) if ending else None,
        _to_microseconds(ending.result_times.get(op.name)) if ending else None,
        op.weights,
        record.multiply_adds.get(op.name, 0),
        _describe_config(view, op),
        reasons.setdefault(view.explain_int8_op(op.name), len(reasons)),
        reasons.setdefault(_format_op_shapes(view, op), len(reasons)),
    ]


def _format_op_shapes(view: View, op: Op) -> str:
    graph = view.graph
    shapes = [graph[name].shape if name in graph else None for name in op.inputs]
    inputs = ", ".join(_format_shape(shape) for shape in shapes if shape is not None)
    if op.shape is None:
        return inputs
    return f"{inputs} → {_format_shape(op.shape)}" if inputs else f"→ {_format_shape(op.shape)}"


def _format_shape(shape: tuple[int | None, ...]) -> str:
    """Format a shape; a question mark for a free size."""
    return " × ".join("?" if size is None else str(size) for size in shape) or "scalar"


def _describe_config(view: View, op: Op) -> str | int:
    """Describe the quantization and corrections of an INT8 op; 1 for other tunable ops, else 0."""
    config = view.plan.get(op.name)
    decided = int(op.name in view.tunable_ops)
    if config is None or config.approach is None:
        return decided
    parts = [] if config.approach is Approach.STATIC else [config.approach.value.replace("_", " ")]
    if view.report is not None and view.report.accelerator is not None:
        parts.append(words_of(config))
    if config.activation is not None and config.approach is Approach.STATIC:
        parts.append(f"calibration {config.activation.algorithm.value}")
    parts.extend(name.replace("_", " ") for name in config.corrections)
    return ", ".join(parts) or decided


def _encode_plans(view: View) -> dict[str, str]:
    """Return trial → encoded precisions; of long runs, only the best trials."""
    room = max(_MOST_PLANS // max(len(view.graph), 1), 1)
    chosen = sorted(view.trials, key=lambda trial: (not trial.met, trial.ranking_loss))[:room]
    followed = {
        plan: precision_letters(view, plan, view.record.setup.follow_plan(plan).effective)
        for plan in {trial.plan for trial in chosen}
    }
    return {str(trial.number): followed[trial.plan] for trial in chosen}


def _to_microseconds(seconds: float | None) -> float | None:
    return None if seconds is None or not isfinite(seconds) else float(f"{seconds * 1e6:.4g}")


def _round_finite(value: float | None) -> float | None:
    return None if value is None or not isfinite(value) else float(f"{value:.3g}")
