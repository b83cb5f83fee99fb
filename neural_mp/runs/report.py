"""Figures of a run, and its stored record for reports without the model."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan, parse_plan
from neural_mp.core.precision import Precision, format_precision_name
from neural_mp.core.quantization_flow import (
    QuantizationFlow,
    QuantizedTensor,
    propagate_quantization,
)
from neural_mp.core.trial import Trial
from neural_mp.space import Capability, Reason
from neural_mp.util.json_fields import NOT_STORED, Count, Finite, JsonFields, NonNegative
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import Printed, format_count, load_displays
from neural_mp.util.validators import invalid_value_error, mapping_of, number, validate_at

_LONG = {Precision.BF16: "bfloat16", Precision.FP16: "float16"}


@dataclass(frozen=True)
class MetricFigures(JsonFields):
    """Figures of one metric among several.

    Attributes:
        baseline, value: value of FP32 and of the result.
        target: the worst accepted value; None if a weighted sum of all metrics has the target.
        higher_is_better: whether larger values are better.
    """

    baseline: float
    value: float
    target: float | None = None
    higher_is_better: bool = True


@dataclass(frozen=True)
class RuntimeFigures(JsonFields):
    """Figures of a runtime that could run the model.

    Attributes:
        framework: the runtime.
        latency, int8_latency, low_float_latency: seconds per batch in FP32, and with all eligible
            ops in INT8, and in BF16 or FP16; None if not measured, or far from the fastest.
        sqnr_db: lowest SQNR of FP32 relative to the source, in dB; None if not measured.
        chosen: whether the result runs in this runtime.
        result_speedup: speed of the result relative to FP32 in this runtime; None if not measured.
        result_speedup_low, result_speedup_high: its 99 % confidence interval.
        reason: why the runtime was ruled out, or its speed relative to the source.
    """

    framework: str
    latency: NonNegative | None = None
    int8_latency: NonNegative | None = None
    sqnr_db: float | None = None
    chosen: bool = False
    reason: str = ""
    result_speedup: float | None = None
    result_speedup_low: float | None = None
    result_speedup_high: float | None = None
    low_float_latency: NonNegative | None = None


@dataclass(frozen=True)
class RuntimeHint(JsonFields):
    """Another installed runtime that runs the FP32 model faster than its own framework.

    Attributes:
        framework: the runtime.
        speedup: its speed in FP32, relative to FP32 in the framework of the model.
        speedup_low, speedup_high: 99 % confidence interval of `speedup`.
    """

    framework: str
    speedup: float
    speedup_low: float
    speedup_high: float

    def __str__(self) -> str:
        return (
            f"{self.framework} runs this model {self.speedup:.1f} times as fast in FP32 "
            f"({self.speedup_low:.1f} to {self.speedup_high:.1f}): set runtime='auto'"
        )


@dataclass(frozen=True)
class AcceleratorFigures(JsonFields):
    """Estimates for a plan on an accelerator, whose speed is not measured.

    Attributes:
        name: the word for `target`.
        title: its name.
        evidence: whether its rules were `measured` with its compiler, or are from `documents`.
        relative_cost: estimated cost of the result, relative to all ops in float.
        shares: widths, e.g. `w8a16`, or a float precision → fraction of the multiplications.
        refused: op type that the compiler does not take → number of ops.
        sqnr_db: op → widths → SQNR of the outputs in dB, if the tensors and the weight of this op
            alone are in these widths; empty if the search did not measure noise.
    """

    name: str
    title: str
    evidence: str
    relative_cost: NonNegative
    shares: Mapping[str, NonNegative] = field(default_factory=dict)
    refused: Mapping[str, Count] = field(default_factory=dict)
    sqnr_db: Mapping[str, Mapping[str, float]] = field(default_factory=dict, repr=False)

    @property
    def words(self) -> str:
        """The shares of the multiplications, largest first, as text."""
        ordered = sorted(self.shares.items(), key=lambda item: -item[1])
        return ", ".join(f"{share:.0%} of MACs in {word}" for word, share in ordered) or "no MACs"


class Stage(StringEnum):
    """Origin of the weights of a plan."""

    NEAREST = "nearest"  #: rounded to nearest, with the corrections that are not learned
    RECONSTRUCTED = "reconstructed"  #: learned from FP32's results, layer by layer
    TRAINED = "trained"  #: trained with the rounding of the plan


#: Stage → heading.
STAGE_WORDS: Mapping[Stage, str] = {
    Stage.NEAREST: "rounded to nearest",
    Stage.RECONSTRUCTED: "after reconstruction",
    Stage.TRAINED: "after training",
}


@dataclass(frozen=True)
class StageNoise(JsonFields):
    """NSR against FP32 of one plan with the weights of each stage, on calibration samples.

    Attributes:
        ops: op of the plan → stage → NSR of its result, or of the result of the kernel that the op
            is fused into.
        outputs: stage → NSR of the noisiest output.
        samples: number of calibration samples.
    """

    ops: Mapping[str, Mapping[str, NonNegative]]
    outputs: Mapping[str, NonNegative]
    samples: Count

    @property
    def measured_stages(self) -> tuple[Stage, ...]:
        """The stages that were measured, in order."""
        return tuple(stage for stage in Stage if stage.value in self.outputs)


@dataclass(frozen=True)
class Report(Printed, JsonFields):
    """The result of a run in figures.

    Attributes:
        metric: name of the metric (`RMSE`); empty without a metric.
        higher_is_better: whether larger values of the metric are better.
        baseline_accuracy, accuracy: the user's metric for FP32 and for the result; None if no
            accuracy could be evaluated.
        metrics: name → figures, if there are several metrics. If each of them has to meet a
            target, `accuracy` is 1 minus the largest loss, and 1 for FP32.
        target: the worst accepted accuracy; None without a baseline.
        output_sqnr_db: if no accuracy was checked, the SQNR of the outputs relative to FP32, on
            calibration samples; None if not measured.
        baseline_latency, latency: seconds per batch: lower decile of interleaved runs; None if no
            batch was available.
        baseline_cpu_seconds, cpu_seconds: seconds of all threads on the CPU per batch, which
            other processes affect less than the latency; None if not measured.
        speedup_low, speedup_high: 99 % confidence interval of `speedup`; None for the FP32 model.
        batch_size: samples in the timed batch.
        streams: concurrent callers that the throughput was measured with: seconds per batch are
            those of all calls, divided by their number. None if latency was measured.
        baseline_size, size: bytes of the weights.
        baseline_footprint, footprint: peak memory of a run on the timed batch in bytes: weights
            plus peak activations, derived from the graph; None if not recorded.
        evaluations: full passes over the evaluation data, including the FP32 baseline.
        seconds: phase (`load`, `baseline`, `calibrate`, `search`, `measure`) → duration.
        effort_seconds: limit that the option `effort` sets to the seconds after calibration; None
            without one, and if `exit_policy.timeout` ends earlier.
        source_precisions: the precisions in which the given model computes, the one with most
            weights first; `("fp32",)` except for models in half precision.
        op_counts: op type → precision → number of ops executed in the precision.
        emulated: precisions in use that are computed in FP32 and rounded on this machine.
        conversions: casts, quantizations and dequantizations on every run.
        amp: the options of auto mixed precision that were set, and their origin.
        best_rejected: if no plan met the target, the trial that came closest.
        warnings: all warnings of the run.
        ineligible: contractions that cannot run in a requested precision, grouped by reason,
            largest group first.
        cache_hits: measurements that came from the measurement cache.
        stage_noise: noise of each op of the plan that was trained, or of the result if its weights
            were reconstructed, at each stage; None otherwise.
        runtimes: figures of the compared runtimes, the source first; empty without a comparison.
        accelerator: estimates for the accelerator that the plan is for; None for CPUs.
        hint: a faster runtime for a run with `runtime="source"`; None if none is known.
        record: the stored record of the run; None if there is none.
    """

    metric: str = ""
    higher_is_better: bool = True
    baseline_accuracy: Finite | None = None
    accuracy: Finite | None = None
    metrics: Mapping[str, MetricFigures] = field(default_factory=dict)
    target: Finite | None = None
    output_sqnr_db: float | None = None
    baseline_latency: NonNegative | None = None
    latency: NonNegative | None = None
    baseline_cpu_seconds: NonNegative | None = None
    cpu_seconds: NonNegative | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    batch_size: Count = 0
    streams: Count | None = None
    baseline_size: Count = 0
    size: Count = 0
    baseline_footprint: Count | None = None
    footprint: Count | None = None
    evaluations: Count = 0
    seconds: Mapping[str, NonNegative] = field(default_factory=dict)
    effort_seconds: NonNegative | None = None
    source_precisions: tuple[str, ...] = (Precision.FP32.value,)
    op_counts: Mapping[str, Mapping[str, Count]] = field(default_factory=dict)
    emulated: tuple[str, ...] = ()
    conversions: ConversionCounts = ConversionCounts()
    amp: tuple[str, ...] = ()
    best_rejected: Trial | None = None
    warnings: tuple[str, ...] = ()
    ineligible: tuple[Reason, ...] = ()
    cache_hits: tuple[str, ...] = ()
    stage_noise: StageNoise | None = None
    runtimes: tuple[RuntimeFigures, ...] = ()
    accelerator: AcceleratorFigures | None = None
    hint: RuntimeHint | None = None
    record: RunRecord | None = field(default=None, compare=False, repr=False, metadata=NOT_STORED)

    @property
    def casts(self) -> int:
        """Number of casts on every run."""
        return self.conversions.casts

    @property
    def converted(self) -> tuple[str, ...]:
        """Messages like `Converted 53/159 nodes to bfloat16 using 2 casts`, one per 16-bit type.

        None for a type that the given model was already in.
        """
        counts = self.op_counts.values()
        nodes = sum(sum(by.values()) for by in counts)
        lowered = [p for p in _LONG if p.value not in self.source_precisions]
        totals = {p: sum(by.get(p.value, 0) for by in counts) for p in lowered}
        return tuple(
            f"Converted {low}/{nodes} nodes to {_LONG[precision]} using "
            f"{format_count(self.casts, 'cast')}"
            for precision, low in totals.items()
            if low
        )

    @property
    def source_name(self) -> str:
        """The precision of the given model as a name, such as `FP32` or `FP16`."""
        return format_precision_name(self.source_precisions)

    @property
    def only_slower(self) -> bool:
        """Whether plans met the accuracy target, but none was faster than FP32."""
        return self.best_rejected is not None and self.best_rejected.lacks_gain

    @property
    def speedup(self) -> float | None:
        """Latency of FP32 divided by that of the result; None if either was not measured."""
        if not self.latency or not self.baseline_latency:
            return None
        return self.baseline_latency / self.latency

    @property
    def cpu_speedup(self) -> float | None:
        """CPU seconds of FP32 divided by those of the result; None if either was not counted."""
        if not self.cpu_seconds or not self.baseline_cpu_seconds:
            return None
        return self.baseline_cpu_seconds / self.cpu_seconds

    @property
    def throughput(self) -> float | None:
        """Samples per second of the result; None if the throughput was not measured."""
        return self._samples_per_second(self.latency)

    @property
    def baseline_throughput(self) -> float | None:
        """Samples per second of FP32; None if the throughput was not measured."""
        return self._samples_per_second(self.baseline_latency)

    def _samples_per_second(self, seconds: float | None) -> float | None:
        return self.batch_size / seconds if self.streams and seconds else None

    def save_html(self, path: str | Path) -> None:
        """Write the run as a self-contained HTML page.

        Raises:
            NeuralMPError: the report has no record, or the file cannot be written.
        """
        load_displays().save_page(self, path)

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts, without the record."""
        values = super().to_dict()
        if self.best_rejected is None:
            del values["best_rejected"]
        figures = ("speedup", "throughput", "baseline_throughput")
        return values | {name: getattr(self, name) for name in figures}


def count_ops(graph: OpGraph, effective: Mapping[str, Precision]) -> dict[str, dict[str, int]]:
    """Return op type → executed precision → number of ops."""
    counts: dict[str, dict[str, int]] = defaultdict(Counter)
    executed = graph.executed(effective)
    for op in graph:
        counts[op.type][executed[op.name].value] += 1
    return dict(counts)


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
class RunSource(JsonFields):
    """The options of a run, for another process that tries a further plan.

    Attributes:
        conf: text of a tuning file with all options that were set, in the file and in Python.
        folder: working directory of the run, which relative paths in the text refer to.
    """

    conf: str
    folder: str


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

    optional_keys: ClassVar[Collection[str] | None] = ()

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

    optional_keys: ClassVar[Collection[str] | None] = ("runtimes",)

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

    def follow_plan(self, plan: PrecisionPlan) -> QuantizationFlow:
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

    optional_keys: ClassVar[Collection[str] | None] = ()

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

    optional_keys: ClassVar[Collection[str] | None] = ("timed_samples",)

    ended: str
    met: bool | None
    plan: Annotated[PrecisionPlan, parse_plan]
    report: Report
    chosen: Count | None = None
    finalists: tuple[Trial, ...] = ()
    predicted: Annotated[Mapping[int, float], _parse_predicted_times] = field(default_factory=dict)
    baseline_times: Mapping[str, NonNegative] = field(default_factory=dict)
    result_times: Mapping[str, NonNegative] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()
    timed_samples: Count | None = None


def _parse_predicted_times(value: object) -> dict[int, float]:
    times = mapping_of(number)(value)
    wrong = next((key for key in times if not (key.isdecimal() and len(key) < 10)), None)
    if wrong is not None:
        raise invalid_value_error("the number of a trial", wrong)
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
