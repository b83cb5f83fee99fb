"""Stored record of a run, for reports without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan, parse_plan
from neural_mp.core.precision import CORRECTIONS
from neural_mp.core.quantization_flow import (
    QuantizationFlow,
    QuantizedTensor,
    propagate_quantization,
)
from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report, RuntimeFigures
from neural_mp.space import Capability
from neural_mp.util.json_fields import Count, JsonFields, NonNegative
from neural_mp.util.validators import invalid, mapping_of, number, validate_at

#: Key of output noise measured without corrections.
NO_CORRECTION = "none"


@dataclass(frozen=True)
class Setting(JsonFields):
    """An option of a run.

    Attributes:
        value: effective value as text.
        origin: origin of the value: `Python`, `the file`, or `default`.
    """

    value: str
    origin: str = "default"


@dataclass(frozen=True)
class Machine(JsonFields):
    """The machine of a run.

    Attributes:
        name: name of the CPU.
        cores: logical cores available to the process.
        flags: relevant CPU flags.
        supports: precision → support (`natively`, `emulated`, `no`), and the reason.
        system: the operating system.
    """

    name: str = "unknown CPU"
    cores: Count = 1
    flags: tuple[str, ...] = ()
    supports: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    system: str = ""


@dataclass(frozen=True)
class RunStart:
    """State of a run at its start.

    Attributes:
        started: date and time, UTC, ISO 8601.
        model: name of the model: a file, or the class of an object.
        framework: the model's framework.
        graph: the graph of the model.
        capabilities: op → supported precisions (bare configs), and reasons for the others.
        tunable_ops: the ops that a plan decides on.
        tensors: tensors that can be quantized.
        fan_in: op with a weight → products summed per output element.
        settings: option → effective value and origin.
        batch_size: samples in the timed batch.
        machine: the machine of the run.
        versions: package → version.
        runtimes: figures of the runtimes that were compared before the search.
    """

    started: str
    model: str
    framework: str
    graph: OpGraph
    capabilities: Mapping[str, Capability]
    tunable_ops: tuple[str, ...] = ()
    tensors: tuple[QuantizedTensor, ...] = ()
    fan_in: Mapping[str, Count] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batch_size: Count = 0
    machine: Machine = Machine()
    versions: Mapping[str, str] = field(default_factory=dict)
    runtimes: tuple[RuntimeFigures, ...] = ()

    def followed(self, plan: PrecisionPlan) -> QuantizationFlow:
        """Return the effective precision of every op under a resolved plan, and the INT8 flow."""
        return propagate_quantization(self.graph, plan.precisions, plan.internally_quantized)


@dataclass(frozen=True)
class Conversion(JsonFields):
    """A place where values change their type on every run.

    Attributes:
        source: the op or graph input whose result is converted.
        readers: the ops that read the converted result.
        kind: `quantize`, `dequantize` or `cast`.
        seconds: duration; None if the runtime does not report it.
    """

    source: str
    readers: tuple[str, ...]
    kind: str
    seconds: NonNegative | None = None


@dataclass(frozen=True)
class RunEnd(JsonFields):
    """State of a run at its end.

    Attributes:
        ended: date and time, UTC, ISO 8601.
        met: whether the target was met; None if no accuracy was checked.
        plan: the plan of the result.
        report: the figures.
        chosen: number of the selected trial; None for the FP32 model.
        finalists: the trials of the final interleaved measurement, with its figures.
        predicted: trial → time as a fraction of FP32's, predicted from the times of single ops.
        baseline_times, result_times: op or conversion → seconds per run of the FP32 model and of
            the result; empty if the framework does not time ops.
        conversions: the conversions in the result.
        timed_samples: samples that `baseline_times` and `result_times` refer to; None for the timed
            batch.
    """

    ended: str
    met: bool | None
    plan: Annotated[PrecisionPlan, parse_plan]
    report: Report
    chosen: Count | None = None
    finalists: tuple[Trial, ...] = ()
    predicted: Annotated[Mapping[int, float], _predicted] = field(default_factory=dict)
    baseline_times: Mapping[str, NonNegative] = field(default_factory=dict)
    result_times: Mapping[str, NonNegative] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()
    timed_samples: Count | None = None


def _predicted(value: object) -> dict[int, float]:
    times = mapping_of(number)(value)
    wrong = next((key for key in times if not (key.isdecimal() and len(key) < 10)), None)
    if wrong is not None:
        raise invalid("the number of a trial", wrong)
    return {int(key): time for key, time in times.items()}


@dataclass(frozen=True)
class ProbeMeasurements(JsonFields):
    """Measurements besides trials.

    Attributes:
        times: time of each op per precision; empty if not requested.
        output_nsr: quantized tensor, or first op of a decision group → corrections as text
            (`none` for none) → output NSR with this tensor or group alone in lower precision.
        elements: op or graph input → number of elements in a run of the timed batch.
        layer_errors: layer with a learned weight → squared error of its results relative to their
            squares: `nearest` rounded to nearest, `learned`, and the `seconds` of learning.
    """

    times: OpTimings = field(default_factory=OpTimings)
    output_nsr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    elements: Mapping[str, NonNegative] = field(default_factory=dict)
    layer_errors: Mapping[str, Mapping[str, NonNegative]] = field(default_factory=dict)


#: Keys of the run cache with the fields of `ProbeMeasurements`; the key of an output NSR ends in
#: corrections and tensor name.
TIMES, ELEMENTS, OUTPUT_NSR = "times", "elements", "output_nsr: "
LAYER_ERRORS = "layer_errors"


def output_nsr_in(entries: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Collect `ProbeMeasurements.output_nsr` from the entries of a run cache."""
    output_nsr: dict[str, dict[str, float]] = {}
    for key, noise in entries.items():
        if key.startswith(OUTPUT_NSR):
            corrections, _, name = key.removeprefix(OUTPUT_NSR).partition(": ")
            output_nsr.setdefault(name, {})[corrections] = validate_at(key, number, noise)
    return output_nsr


@dataclass(frozen=True)
class RunRecord:
    """All stored data of a run.

    Attributes:
        setup: state of the run at its start.
        name: name of the run in the history; empty without a history.
        baseline: FP32 on the user's data (`accuracy`, `seconds`, and `metrics` by name if there
            are several), and the resulting `target`; None before the measurement.
        observations: the observations of calibration.
        trials: all trials, oldest first.
        measured: measurements besides trials.
        ending: state at the end; None for a run that was killed or is still running.
    """

    setup: RunStart
    name: str = ""
    baseline: Mapping[str, Any] | None = None
    observations: Observations = field(default_factory=Observations)
    trials: tuple[Trial, ...] = ()
    measured: ProbeMeasurements = field(default_factory=ProbeMeasurements)
    ending: RunEnd | None = None

    @cached_property
    def multiply_adds(self) -> dict[str, int]:
        """Op with a weight → multiply-adds in a run of the timed batch, if known."""
        elements = self.measured.elements
        fan_in = self.setup.fan_in.items()
        return {op: round(elements[op] * count) for op, count in fan_in if op in elements}


def corrections_in(plan: PrecisionPlan) -> str:
    """Return the corrections used by any op of a plan, as text."""
    corrections = {name for config in plan.values() for name in config.corrections}
    return " ".join(name for name in CORRECTIONS if name in corrections) or NO_CORRECTION
