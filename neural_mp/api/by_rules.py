"""Conversion by rules that name a configuration for each op, without search and evaluation."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core import hardware as machine
from neural_mp.core.enums import Approach, Capture
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32
from neural_mp.errors import CaptureError, DataError
from neural_mp.runs.report import Report, count_ops
from neural_mp.search.corrections import best_corrections, with_corrections
from neural_mp.space import ConversionRules, TuningSpace, planned_ops, reached_by
from neural_mp.tuning.evaluation.batches import FirstBatch
from neural_mp.util.text import counted


@dataclass(frozen=True)
class Conversion:
    """Options of a conversion by rules.

    Attributes:
        rules: op → its configuration.
        capture: see `MixedPrecision`.
        otherwise: capture of a model that has no graph of that capture; None for an error.
        corrects: whether INT8 ops get the corrections that at least halve their noise.
        framework: framework of the model; None to detect.
        inputs, outputs: see `MixedPrecision`.
    """

    rules: ConversionRules
    capture: Capture = Capture.WHOLE
    otherwise: Capture | None = None
    corrects: bool = False
    framework: str | None = None
    inputs: Any = None
    outputs: Any = None


def converted_by_rules(
    source: object,
    wanted: Conversion,
    batches: Iterable[Any] | None = None,
    example: object = None,
) -> OptimizedModel:
    """Convert every op as its rule says.

    Args:
        source: the model: object, path or `module:attribute`.
        wanted: the rules, and options of loading.
        batches: inputs for calibration, read several times; None if the rules need none.
        example: inputs of one batch to capture the model with; default: the first of `batches`.

    Raises:
        DataError: the rules need calibration inputs, and there are none.
        NeuralMPError: the model cannot be loaded or converted.
    """
    started = time.perf_counter()
    data = list(batches) if isinstance(batches, Iterator) else batches
    if example is None and data is not None:
        example = next(iter(data), None)
    loaded = _load_model(source, wanted, example)
    space = loaded.adaptor.space(loaded.held, machine.detect())
    plan = wanted.rules.plan(space)
    _require_data(plan, data)
    tunable = loaded.in_space(space, None if data is None else lambda: iter(data))
    if any(config.approach is Approach.STATIC for config in plan.values()):
        tunable = tunable.calibrated(() if data is None else data)
        space = reached_by(tunable.space, tunable.observations.ranges)
        plan = wanted.rules.plan(space)
        if wanted.corrects:
            plan = with_corrections(plan, space, best_corrections(tunable.observations))
    warnings = [
        *loaded.warnings,
        *tunable.observations.notes,
        *_unmet_rule_notes(wanted.rules, space, plan),
    ]
    resolved = tunable.space.resolve(plan)
    converted = tunable.converted(resolved)
    tunable.check_fusions(converted, loaded.example_inputs() if example is None else example)
    report = Report(
        baseline_size=loaded.size,
        size=converted.size,
        seconds={"convert": time.perf_counter() - started},
        source_precisions=tuple(p.value for p in space.graph.source_precisions),
        op_counts=count_ops(space.graph, resolved.effective),
        conversions=converted.conversions,
        warnings=tuple(warnings),
    )
    return OptimizedModel(
        converted,
        resolved.plan,
        report,
        observations=tunable.observations,
        planned=planned_ops(space, resolved),
    )


def _load_model(source: object, conversion: Conversion, example: object) -> AnyModel:
    def load_with_capture(capture: Capture) -> AnyModel:
        return load_source(
            source,
            conversion.framework,
            conversion.inputs,
            outputs=conversion.outputs,
            example=FirstBatch(example, ""),
            capture=capture,
        )

    try:
        return load_with_capture(conversion.capture)
    except CaptureError:
        if conversion.otherwise is None:
            raise
        return load_with_capture(conversion.otherwise)


def _require_data(plan: PrecisionPlan, data: Iterable[Any] | None) -> None:
    needing = [
        op for op, config in plan.items() if config.needs_data or config.approach is Approach.STATIC
    ]
    if needing and data is None:
        raise DataError(
            f"{needing[0]} is quantized as {plan[needing[0]]}, which requires calibration inputs, "
            f"got none; run the model on calibration data before the conversion"
        )


def _unmet_rule_notes(rules: ConversionRules, space: TuningSpace, plan: PrecisionPlan) -> list[str]:
    notes = [
        f"{name!r} matches no op or layer of the model" for name in rules.unmatched(space.graph)
    ]
    refused = [
        op.name
        for op in space.contractions
        if (allowed := rules.constraint(op).precisions) is not None
        and plan.get(op.name, FP32).precision not in allowed
    ]
    if refused:
        shown = ", ".join(refused[:3]) + (", …" if len(refused) > 3 else "")
        notes.append(f"{counted(len(refused), 'op')} cannot run as asked and stay in FP32: {shown}")
    return notes
