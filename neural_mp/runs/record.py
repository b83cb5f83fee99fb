"""What is kept of a run for people who look at it later, without the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from neural_mp.core.enums import Approach
from neural_mp.core.graph import OpGraph
from neural_mp.core.observations import Observations, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CORRECTIONS
from neural_mp.core.quantization_flow import (
    QuantizationFlow,
    QuantizedTensor,
    propagate_quantization,
)
from neural_mp.core.trial import Trial
from neural_mp.runs.report import Report
from neural_mp.space import Capability
from neural_mp.util.validators import number, validate_at

T = TypeVar("T")


#: Where noise stands that no repair lessens.
NO_REPAIR = "none"


@dataclass(frozen=True)
class Setting:
    """An option of a run.

    Attributes:
        value: what held, in words.
        origin: who set it: `Python`, `the file`, or `default`.
    """

    value: str
    origin: str = "default"


@dataclass(frozen=True)
class Machine:
    """The machine of a run.

    Attributes:
        name: of its CPU.
        cores: logical cores that the process may use.
        flags: the CPU flags that count.
        supports: precision → how it runs there (`natively`, `emulated`, `no`), and why.
        system: the operating system.
    """

    name: str = "unknown CPU"
    cores: int = 1
    flags: tuple[str, ...] = ()
    supports: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    system: str = ""


@dataclass(frozen=True)
class RunStart:
    """A run as it starts.

    Attributes:
        started: date and time, UTC, ISO 8601.
        model: what the user called the model: a file, or the class of an object.
        framework: the model's framework.
        graph: its ops.
        capabilities: op → what it may run in here, with bare configs, and why not in the rest.
        tunable_ops: the ops that a plan decides on.
        tensors: what may be stored in INT8.
        fan_in: op → how many products every number that it writes is the sum of, of ops with a
            weight.
        settings: option → what held, and who set it.
        batch_size: samples in the batch that is timed.
        machine: where it ran.
        versions: package → version.
    """

    started: str
    model: str
    framework: str
    graph: OpGraph
    capabilities: Mapping[str, Capability]
    tunable_ops: tuple[str, ...] = ()
    tensors: tuple[QuantizedTensor, ...] = ()
    fan_in: Mapping[str, int] = field(default_factory=dict)
    settings: Mapping[str, Setting] = field(default_factory=dict)
    batch_size: int = 0
    machine: Machine = Machine()
    versions: Mapping[str, str] = field(default_factory=dict)

    def followed(self, plan: PrecisionPlan) -> QuantizationFlow:
        """What every op runs in under a resolved plan, and where INT8 flows."""
        alone = {
            op
            for op, config in plan.items()
            if config.approach in (Approach.DYNAMIC, Approach.WEIGHT_ONLY)
        }
        return propagate_quantization(self.graph, plan.precisions, frozenset(alone))


@dataclass(frozen=True)
class Conversion:
    """A place where values change their type on every run.

    Attributes:
        source: the op or graph input whose result is converted.
        readers: the ops that read it converted.
        kind: `quantize`, `dequantize` or `cast`.
        seconds: how long it takes; None where the runtime does not say.
    """

    source: str
    readers: tuple[str, ...]
    kind: str
    seconds: float | None = None


@dataclass(frozen=True)
class RunEnd:
    """A run as it ends.

    Attributes:
        ended: date and time, UTC, ISO 8601.
        met: whether the target was met; None where no accuracy was checked.
        plan: what the result runs in.
        report: the figures.
        chosen: the number of the trial that became the result; None for the FP32 model.
        finalists: the trials that were measured side by side last, with those figures.
        predicted: trial → its time as a share of FP32's, as the times of single ops foretell.
        baseline_times, result_times: op, or conversion by a name of its own → seconds of one run,
            of the FP32 model and of the result; empty where that would have taken too long.
        conversions: where the result converts.
    """

    ended: str
    met: bool | None
    plan: PrecisionPlan
    report: Report
    chosen: int | None = None
    finalists: tuple[Trial, ...] = ()
    predicted: Mapping[int, float] = field(default_factory=dict)
    baseline_times: Mapping[str, float] = field(default_factory=dict)
    result_times: Mapping[str, float] = field(default_factory=dict)
    conversions: tuple[Conversion, ...] = ()


@dataclass(frozen=True)
class ProbeMeasurements:
    """What was measured on the way, beside the trials.

    Attributes:
        times: how long single ops take in every precision; empty where nobody asked for it.
        output_nsr: quantized tensor, or first op of a decision → repairs in words (`none` for
            none) → noise at the outputs, as a share of their power, where it alone is in a lower
            precision; of those that were measured.
        elements: op or graph input → numbers that it holds in a run of the timed batch.
    """

    times: OpTimings = field(default_factory=OpTimings)
    output_nsr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    elements: Mapping[str, float] = field(default_factory=dict)


#: Keys of the cache of a run that its record is read from: under the names of the fields of
#: `Measured`, noise at the outputs with the repairs and the name of its tensor behind this.
TIMES, ELEMENTS, OUTPUT_NSR = "times", "elements", "output_nsr: "


def output_nsr_in(entries: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """See `Measured.arriving`; of all that the cache of a run holds."""
    found: dict[str, dict[str, float]] = {}
    for key, noise in entries.items():
        if key.startswith(OUTPUT_NSR):
            repairs, _, name = key.removeprefix(OUTPUT_NSR).partition(": ")
            found.setdefault(name, {})[repairs] = validate_at(key, number, noise)
    return found


@dataclass(frozen=True)
class RunRecord:
    """All that is kept of a run.

    Attributes:
        setup: how it started.
        name: what the history calls it; empty where there is none.
        baseline: FP32 on the user's data (`accuracy`, `seconds`, and `metrics` by name where there
            are several), and the `target` that follows; None before it was measured.
        observations: what calibration saw.
        trials: what was tried, oldest first.
        measured: what was measured beside that.
        ending: how it ended; None for a run that was killed, or goes on.
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
        """Op with a weight → products that a run of the batch adds up; nothing if not known."""
        written = self.measured.elements
        fan_in = self.setup.fan_in.items()
        return {op: round(written[op] * products) for op, products in fan_in if op in written}


def repairs_in(plan: PrecisionPlan) -> str:
    """The repairs that any op of a plan has, in words."""
    found = {repair for config in plan.values() for repair in config.corrections}
    return " ".join(repair for repair in CORRECTIONS if repair in found) or NO_REPAIR
