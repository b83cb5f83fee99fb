"""Conversion by a given plan, without a search."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrected_weights import CorrectionOptions
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.api.portability import hardware_for
from neural_mp.config.options import OPTIONS
from neural_mp.core import hardware as machine
from neural_mp.core.enums import Approach, Capture
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.quant_spec import ROUNDING_STEPS
from neural_mp.errors import PlanError
from neural_mp.io.measurement_cache import CACHE_FOLDER, WEIGHTS_FOLDER
from neural_mp.runs.report import Report, count_ops
from neural_mp.space import ResolvedPlan, planned_ops, without_non_finite
from neural_mp.tuning.final_selection import compare_latency
from neural_mp.tuning.measurement.objectives import Footprints, Measurement
from neural_mp.util.memory import FREED


@dataclass(frozen=True)
class OpenedPlan:
    """A model, and a plan that fits the model and this machine.

    Attributes:
        loaded: the given model.
        tunable: the same with the plan's tuning space and observations.
        resolved: the plan.
        warnings: notes to the user.
    """

    loaded: AnyModel
    tunable: AnyTunableModel
    resolved: ResolvedPlan
    warnings: tuple[str, ...]

    @property
    def needs_ranges(self) -> bool:
        """Whether the plan has ops with calibrated ranges."""
        return any(c.approach is Approach.STATIC for c in self.resolved.plan.values())

    def result(self, converted: AnyModel, started: float, inputs: object = None) -> OptimizedModel:
        """Return a converted model with its figures.

        Args:
            converted: the model.
            started: the time of the start, by `time.perf_counter`.
            inputs: the batch that latency is measured with; None for the example of the model.
        """
        measurement = Measurement(self.loaded.example_inputs() if inputs is None else inputs)
        footprints = Footprints(self.tunable, measurement.inputs)
        speed = compare_latency(*measurement.rounds([self.loaded, converted]))
        FREED.now()
        space = self.tunable.space
        report = Report(
            **speed.figures,
            batch_size=measurement.batch_size,
            baseline_size=self.loaded.size,
            size=converted.size,
            baseline_footprint=footprints.baseline,
            footprint=footprints(converted, self.resolved),
            seconds={"convert": time.perf_counter() - started},
            source_precisions=tuple(p.value for p in space.graph.source_precisions),
            op_counts=count_ops(space.graph, self.resolved.effective),
            conversions=converted.conversions,
            warnings=self.warnings,
        )
        FREED.now()
        return OptimizedModel(
            converted,
            self.resolved.plan,
            report,
            observations=self.tunable.observations,
            planned=planned_ops(space, self.resolved),
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
    target: str = machine.HOST_TARGET,
    capture: Capture = Capture.WHOLE,
    rounding_steps: int = ROUNDING_STEPS,
    random_seed: int = 0,
    workspace: str | Path | None = None,
) -> OptimizedModel:
    """Replay a plan on a model.

    Args:
        source: the model: object, path or `module:attribute`.
        plan: a plan, or a plan file, which also contains calibration results.
        observations: calibration results, if `plan` is not a file.
        framework: framework of the model; default: detected.
        inputs: example inputs, if the model requires them; latency is measured with them.
        calibration: batches of inputs, for weights corrected with data (`awq`, `gptq`,
            `autoround`).
        hardware: hardware of this machine; default: detected.
        target: CPU to convert for, a name in `neural_mp.core.hardware.TARGETS`.
        capture: see `MixedPrecision`.
        rounding_steps: steps per decoder block of `autoround`.
        random_seed: seed of these steps.
        workspace: folder in which finished blocks of corrected weights are kept, so that an
            interrupted call continues after them; None to keep none.

    Raises:
        PlanError: the plan is malformed or does not fit the model or the hardware.
        ConversionError: the plan quantizes tensors of unknown range.
    """
    started = time.perf_counter()
    if not isinstance(plan, PrecisionPlan | str | Path):
        raise PlanError(
            f"plan must be a PrecisionPlan or the path of a plan file, got a "
            f"{type(plan).__name__}; make a plan from op → configuration with PrecisionPlan({{…}})"
        )
    OPTIONS["rounding_steps"].check(rounding_steps)
    OPTIONS["random_seed"].check(random_seed)
    if not isinstance(plan, PrecisionPlan):
        plan, observations = load_plan_file(plan)
    loaded = load_source(source, framework, inputs, capture=capture)
    data = None if calibration is None else list(calibration)
    folder = None if workspace is None else Path(workspace) / CACHE_FOLDER / WEIGHTS_FOLDER
    options = CorrectionOptions(LearnOptions(rounding_steps, random_seed), folder)
    opened = open_plan(loaded, plan, observations, data, options, hardware, target)
    if observations is None and opened.needs_ranges:
        raise PlanError(
            "a plan of INT8 ops with calibrated ranges requires observations, got none; "
            "use a plan file written by save_plan or `neural-mp tune --output`"
        )
    converted = opened.tunable.converted(opened.resolved)
    opened.tunable.check_fusions(converted, loaded.example_inputs())
    return opened.result(converted, started, inputs)


def open_plan(
    loaded: AnyModel,
    plan: PrecisionPlan,
    observations: Observations | None,
    data: list[Any] | None = None,
    options: CorrectionOptions | None = None,
    hardware: Hardware | None = None,
    target: str = machine.HOST_TARGET,
) -> OpenedPlan:
    """Return a model together with a plan; arguments as in `convert_with_plan`.

    Raises:
        PlanError: the plan does not fit the model or the hardware.
    """
    target_machine, notes = hardware_for(target, hardware or machine.detect(), loaded.adaptor)
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
    tunable = loaded.in_space(space, calibration, options).observed(observations)
    # Corrections that need the missing data stay in this space: the conversion names them.
    resolved = without_non_finite(space, observations.non_finite).resolve(right)
    return OpenedPlan(loaded, tunable, resolved, tuple(warnings))
