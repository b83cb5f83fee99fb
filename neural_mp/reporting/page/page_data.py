"""Data for the script of the page: the map, the table of ops, the plans of the trials."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any

from neural_mp.core.enums import Approach
from neural_mp.core.graph import Op
from neural_mp.core.op_timings import MAX_GAIN
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.errors import visible
from neural_mp.reporting.page.map_layout import map_levels
from neural_mp.reporting.page.page_model import View
from neural_mp.targets import Widths, words_of
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
