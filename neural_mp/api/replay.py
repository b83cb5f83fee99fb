"""Conversion by a plan, or by rules that name a configuration for each op, without a search."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrected_weights import CorrectionOptions
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.portability import find_target_hardware
from neural_mp.api.targets import profile_of, seen_by_target
from neural_mp.config.options import OPTIONS
from neural_mp.core import hardware as machine
from neural_mp.core.enums import FLOAT_CACHE, Approach, Capture
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import FP32
from neural_mp.core.quant_spec import ROUNDING_STEPS
from neural_mp.errors import CaptureError, DataError, PlanError
from neural_mp.io.measurement_cache import CACHE_FOLDER, WEIGHTS_FOLDER
from neural_mp.runs.report import Report, count_ops
from neural_mp.search.corrections import choose_best_corrections, with_corrections
from neural_mp.space import (
    ConversionRules,
    Departure,
    ResolvedPlan,
    TuningSpace,
    find_departures,
    limit_to_reached,
    list_effective_ops,
    without_non_finite,
)
from neural_mp.targets import TargetProfile, is_profile
from neural_mp.targets.profile import TargetCosts
from neural_mp.tuning.evaluation.batches import FirstBatch
from neural_mp.tuning.final_selection import UNMEASURED, compare_latency
from neural_mp.tuning.measurement.objectives import Footprints, Measurement
from neural_mp.tuning.recording import estimate_accelerator_figures
from neural_mp.util.system.memory import FREED
from neural_mp.util.text import format_count

logger = logging.getLogger(__name__)

#: Number of ops named in notes on the consequences of an edit.
_MAX_NOTES = 8


@dataclass(frozen=True)
class OpenedPlan:
    """A model, and a plan that fits the model and the target.

    Attributes:
        loaded: the given model, as planned for the target.
        tunable: the same with the plan's tuning space and observations.
        resolved: the plan.
        warnings: notes to the user.
        departures: the ops that run in another precision than in the plan as given.
        accelerator: the accelerator that the plan is for; None for a CPU.
    """

    loaded: AnyModel
    tunable: AnyTunableModel
    resolved: ResolvedPlan
    warnings: tuple[str, ...]
    departures: tuple[Departure, ...] = ()
    accelerator: TargetProfile | None = None

    @property
    def needs_ranges(self) -> bool:
        """Whether the plan has ops with calibrated ranges."""
        return any(c.approach is Approach.STATIC for c in self.resolved.plan.values())

    def build_result(
        self, converted: AnyModel, started: float, inputs: object = None
    ) -> OptimizedModel:
        """Return a converted model with its figures.

        Latency is measured with `inputs`, by default with the example of the model; not for an
        accelerator, which this CPU only simulates.
        """
        measurement = Measurement(self.loaded.example_inputs() if inputs is None else inputs)
        footprints = Footprints(self.tunable, measurement.inputs)
        speed, costs = UNMEASURED, None
        baseline_cpu_seconds = cpu_seconds = None
        if self.accelerator is None:
            pair = [self.loaded, converted]
            speed = compare_latency(*measurement.measure_rounds(pair))
            baseline_cpu_seconds, cpu_seconds = measurement.count_cpu_seconds(pair)
        else:
            costs = TargetCosts(self.accelerator, *self.tunable.count_op_work(measurement.inputs))
        FREED.return_memory()
        space = self.tunable.space
        report = Report(
            **speed.report_figures,
            baseline_cpu_seconds=baseline_cpu_seconds,
            cpu_seconds=cpu_seconds,
            batch_size=measurement.batch_size,
            baseline_size=self.loaded.size,
            size=converted.size,
            baseline_footprint=footprints.baseline_bytes,
            footprint=footprints(converted, self.resolved),
            seconds={"convert": time.perf_counter() - started},
            source_precisions=tuple(p.value for p in space.graph.source_precisions),
            op_counts=count_ops(space.graph, self.resolved.effective),
            conversions=converted.conversions,
            warnings=(*self.warnings, *measurement.contention.contention_warnings),
            accelerator=estimate_accelerator_figures(costs, space.graph, self.resolved.plan),
        )
        FREED.return_memory()
        return OptimizedModel(
            converted,
            self.resolved.plan,
            report,
            observations=self.tunable.observations,
            planned=list_effective_ops(space, self.resolved),
        )


def convert_with_plan(
    source: object,
    plan: PrecisionPlan | str | Path,
    *,
    observations: Observations | None = None,
    framework: str | None = None,
    inputs: object = None,
    calibration: Iterable[Any] | None = None,
    hardware: Hardware | None = None,
    target: str | None = None,
    capture: Capture = Capture.WHOLE,
    kv_cache: str = FLOAT_CACHE,
    rounding_steps: int = ROUNDING_STEPS,
    random_seed: int = 0,
    workspace: str | Path | None = None,
    strict: bool = False,
) -> OptimizedModel:
    """Replay a plan on a model.

    Ops that an edit of the plan changes without naming them, e.g. a concatenation after a
    convolution that was set to FP32, are logged as warnings, and in the report, with the reason.

    Args:
        source: the model: object, path or `module:attribute`.
        plan: a plan, or a plan file, which also contains calibration results.
        observations: calibration results, if `plan` is not a file.
        framework: framework of the model; default: detected.
        inputs: example inputs, if the model requires them; latency is measured with them.
        calibration: batches of inputs, for weights corrected with data (`awq`, `gptq`,
            `autoround`).
        hardware: hardware of this machine; default: detected.
        target: CPU to convert for, a name in `neural_mp.core.hardware.TARGETS`; or an accelerator:
            the name or the path of a profile; default: the accelerator that the plan names, or
            this CPU.
        capture: see `MixedPrecision`.
        kv_cache: see `MixedPrecision`.
        rounding_steps: steps per decoder block of `autoround`.
        random_seed: seed of these steps.
        workspace: folder in which finished blocks of corrected weights are kept, so that an
            interrupted call continues after them; None to keep none.
        strict: whether to refuse a plan under which an op runs in another precision than the plan
            names for the op; ops fused into the kernel of an edited op follow that op.

    Raises:
        ConfigurationError: the target is unknown, or cannot run the model.
        PlanError: the plan is malformed or does not fit the model or the target, or is refused by
            `strict`.
        ConversionError: the plan quantizes tensors of unknown range.
    """
    started = time.perf_counter()
    if not isinstance(plan, PrecisionPlan | str | Path):
        raise PlanError(
            f"plan must be a PrecisionPlan or the path of a plan file, got a "
            f"{type(plan).__name__}; make a plan from op → configuration with PrecisionPlan({{…}})"
        )
    OPTIONS["kv_cache"].check_value(kv_cache)
    OPTIONS["rounding_steps"].check_value(rounding_steps)
    OPTIONS["random_seed"].check_value(random_seed)
    if not isinstance(plan, PrecisionPlan):
        plan, observations = load_plan_file(plan)
    loaded = load_source(source, framework, inputs, capture=capture, kv_cache=kv_cache)
    data = None if calibration is None else list(calibration)
    folder = None if workspace is None else Path(workspace) / CACHE_FOLDER / WEIGHTS_FOLDER
    options = CorrectionOptions(LearnOptions(rounding_steps, random_seed), folder)
    opened = open_plan(loaded, plan, observations, data, options, hardware, target)
    if observations is None and opened.needs_ranges:
        raise PlanError(
            "a plan of INT8 ops with calibrated ranges requires observations, got none; "
            "use a plan file written by save_plan or `neural-mp tune --output`"
        )
    if strict:
        _refuse_departures(opened.departures)
    for note in _describe_departures(opened.departures):
        logger.warning(note)
    converted = opened.tunable.convert_by_plan(opened.resolved)
    opened.tunable.check_fusions(converted, opened.loaded.example_inputs())
    return opened.build_result(converted, started, inputs)


def open_plan(
    loaded: AnyModel,
    plan: PrecisionPlan,
    observations: Observations | None,
    data: list[Any] | None = None,
    options: CorrectionOptions | None = None,
    hardware: Hardware | None = None,
    target: str | None = None,
) -> OpenedPlan:
    """Return a model together with a plan; arguments as in `convert_with_plan`.

    Raises:
        ConfigurationError: the target is unknown, or cannot run the model.
        PlanError: the plan does not fit the model or the target.
    """
    target = _target_of(plan, target)
    loaded, cpu = seen_by_target(loaded, target)
    target_machine, notes = find_target_hardware(cpu, hardware or machine.detect(), loaded.adaptor)
    warnings = [*loaded.warnings, *notes]
    space = loaded.adaptor.space(loaded.held, target_machine)
    right = space.with_local_weight_ranges(plan)
    changed = sum(right[op] != config for op, config in plan.items())
    if changed:
        warnings.append(
            f"the weights of {changed} ops are stored in another range than in the plan: "
            f"{target_machine.int8_accumulation.in_words}"
        )
    calibration = None if data is None else lambda: iter(data)
    observations = observations or Observations()
    tunable = loaded.in_space(space, calibration, options).with_observations(observations)
    # Corrections that need the missing data stay in this space: the conversion names them.
    resolved = without_non_finite(space, observations.non_finite).resolve(right)
    departures = find_departures(space, right, resolved)
    warnings += _describe_departures(departures)
    return OpenedPlan(loaded, tunable, resolved, tuple(warnings), departures, profile_of(target))


def _describe_departures(departures: Sequence[Departure]) -> list[str]:
    """Return a note for each of the first departures, and one for all ops fused into others."""
    single = [departure for departure in departures if departure.fused_into is None]
    notes = [f"after an edit of the plan, {departure}" for departure in single[:_MAX_NOTES]]
    if len(single) > _MAX_NOTES:
        notes.append(f"so do {format_count(len(single) - _MAX_NOTES, 'more op')}: see the plan")
    fused = [f"{d.op!r} with {d.fused_into!r}" for d in departures if d.fused_into is not None]
    if fused:
        shown = ", ".join(fused[:_MAX_NOTES]) + (", …" if len(fused) > _MAX_NOTES else "")
        notes.append(f"ops of the kernels of edited ops follow their precision: {shown}")
    return notes


def _refuse_departures(departures: Sequence[Departure]) -> None:
    for departure in departures:
        if departure.fused_into is None:
            raise PlanError(
                f"a strict replay must run every op as the plan says, but {departure}; set the op "
                f"to {departure.effective} in the plan as well, or replay without strict"
            )


def _target_of(plan: PrecisionPlan, target: str | None) -> str:
    """Return the target that a plan is applied for: `target`, or else the one that the plan names.

    Raises:
        ConfigurationError: there is no such target.
        PlanError: the plan is for another accelerator.
    """
    if target is None:
        target = plan.target or machine.HOST_TARGET
        if plan.target and not is_profile(target):
            raise PlanError(
                f"the plan is for {target!r}, whose profile is a file of yours; give its path as "
                f"the target"
            )
        return target
    profile = profile_of(target)
    if plan.target and plan.target != (None if profile is None else profile.name):
        raise PlanError(
            f"target must be {plan.target!r}, the accelerator that the plan is for, or none, got "
            f"{target!r}; widths of one target are not those of another"
        )
    return target


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


def convert_by_rules(
    source: object, wanted: Conversion, batches: Iterable[Any] | None = None, example: object = None
) -> OptimizedModel:
    """Convert every op as its rule says.

    `batches` are inputs for calibration, read several times; None if the rules need none. The model
    is captured with `example`, by default with the first of `batches`.

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
    plan = wanted.rules.build_plan(space)
    _require_data(plan, data)
    tunable = loaded.in_space(space, None if data is None else lambda: iter(data))
    if any(config.approach is Approach.STATIC for config in plan.values()):
        tunable = tunable.with_calibration(() if data is None else data)
        space = limit_to_reached(tunable.space, tunable.observations.ranges)
        plan = wanted.rules.build_plan(space)
        if wanted.corrects:
            plan = with_corrections(plan, space, choose_best_corrections(tunable.observations))
    warnings = [
        *loaded.warnings,
        *tunable.observations.notes,
        *_unmet_rule_notes(wanted.rules, space, plan),
    ]
    resolved = tunable.space.resolve(plan)
    converted = tunable.convert_by_plan(resolved)
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
        planned=list_effective_ops(space, resolved),
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
        f"{name!r} matches no op or layer of the model"
        for name in rules.find_unmatched(space.graph)
    ]
    refused = [
        op.name
        for op in space.contractions
        if (allowed := rules.constraint_for(op).precisions) is not None
        and plan.get(op.name, FP32).precision not in allowed
    ]
    if refused:
        shown = ", ".join(refused[:3]) + (", …" if len(refused) > 3 else "")
        notes.append(
            f"{format_count(len(refused), 'op')} cannot run as asked and stay in FP32: {shown}"
        )
    return notes
