"""What is kept of a run for people who look at it later, without the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from neural_mp.core.graph import Layer, Op, OpGraph
from neural_mp.core.observations import Observations, Times
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import (
    QuantizationFlow,
    QuantizedTensor,
    trace_quantization,
)
from neural_mp.core.trial import Trial
from neural_mp.core.words import Approach
from neural_mp.errors import HistoryError
from neural_mp.space import Capability
from neural_mp.tuning.report import Report

T = TypeVar("T")


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
class Setup:
    """A run as it starts.

    Attributes:
        started: date and time, UTC, ISO 8601.
        model: what the user called the model: a file, or the class of an object.
        framework: the model's framework.
        graph: its ops.
        capabilities: op → what it may run in here, with bare configs, and why not in the rest.
        decided: the ops that a plan decides on.
        tensors: what may be stored in INT8.
        channels: op → output channels, of ops whose weight is known.
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
    decided: tuple[str, ...] = ()
    tensors: tuple[QuantizedTensor, ...] = ()
    channels: Mapping[str, int] = field(default_factory=dict)
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
        return trace_quantization(self.graph, plan.precisions, frozenset(alone))


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
class Ending:
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
class Measured:
    """What was measured on the way, beside the trials.

    Attributes:
        times: how long single ops take in every precision; empty where nobody asked for it.
        arriving: quantized tensor, or op → noise at the outputs, as a share of their power, where
            it alone is in a lower precision; of those that were measured.
        values: op or graph input → numbers that it holds in a run of the batch that is timed.
    """

    times: Times = field(default_factory=Times)
    arriving: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """All that is kept of a run.

    Attributes:
        setup: how it started.
        name: what the history calls it; empty where there is none.
        baseline: FP32 on the user's data (`accuracy`, `seconds`, and `metrics` by name where there
            are several); None before it was measured.
        observations: what calibration saw.
        trials: what was tried, oldest first.
        measured: what was measured beside that.
        ending: how it ended; None for a run that was killed, or goes on.
    """

    setup: Setup
    name: str = ""
    baseline: Mapping[str, Any] | None = None
    observations: Observations = field(default_factory=Observations)
    trials: tuple[Trial, ...] = ()
    measured: Measured = field(default_factory=Measured)
    ending: Ending | None = None

    @cached_property
    def multiply_adds(self) -> dict[str, int]:
        """Op with a weight → multiplications with an addition that a run of the batch takes.

        Every number that the op writes is a sum over the part of the weight that belongs to its
        channel.
        """
        found = {}
        for op, channels in self.setup.channels.items():
            written = self.measured.values.get(op, 0.0)
            weights = self.setup.graph[op].weights
            if channels and written and weights:
                found[op] = round(written * weights / channels)
        return found


def setup_to_dict(setup: Setup) -> dict[str, Any]:
    """A setup as plain lists, dicts, numbers and strings."""
    graph = setup.graph
    reasons: dict[str, int] = {}  # most ops give one of a few
    ops = []
    for op in graph:
        known = setup.capabilities[op.name]
        why = {p.value: reasons.setdefault(w, len(reasons)) for p, w in known.reasons.items()}
        ops.append(
            {
                **{name: value for name, value in vars(op).items() if value and name != "layers"},
                **({"layers": [[part.name, part.type] for part in op.layers]} if op.layers else {}),
                "runs in": [p.value for p in known.precisions],
                **({"emulated": sorted(p.value for p in known.emulated)} if known.emulated else {}),
                **({"why not": why} if why else {}),
            }
        )
    return {
        **{name: getattr(setup, name) for name in ("started", "model", "framework", "batch_size")},
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "ops": ops,
        "reasons": list(reasons),
        "decided": list(setup.decided),
        "tensors": [asdict(tensor) for tensor in setup.tensors],
        "channels": dict(setup.channels),
        "settings": {name: asdict(setting) for name, setting in setup.settings.items()},
        "machine": asdict(setup.machine),
        "versions": dict(setup.versions),
    }


def setup_from_dict(data: Mapping[str, Any]) -> Setup:
    """Read back what `setup_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the start of a run", _setup, data)


def _setup(data: Mapping[str, Any]) -> Setup:
    ops, capabilities = [], {}
    for said in data["ops"]:
        fields = {name: value for name, value in said.items() if name in Op.__dataclass_fields__}
        fields["inputs"] = tuple(said.get("inputs", ()))
        fields["layers"] = tuple(Layer(*part) for part in said.get("layers", ()))
        ops.append(Op(**fields))
        capabilities[said["name"]] = Capability(
            tuple(OpConfig(Precision(word)) for word in said["runs in"]),
            {Precision(p): data["reasons"][w] for p, w in said.get("why not", {}).items()},
            frozenset(map(Precision, said.get("emulated", ()))),
        )
    machine = dict(data["machine"])
    machine["flags"] = tuple(machine["flags"])
    machine["supports"] = {p: (how, why) for p, (how, why) in machine["supports"].items()}
    return Setup(
        **{name: data[name] for name in ("started", "model", "framework", "batch_size")},
        graph=OpGraph(ops, data["inputs"], data["outputs"]),
        capabilities=capabilities,
        decided=tuple(data["decided"]),
        tensors=tuple(
            QuantizedTensor(
                t["name"], *(tuple(t[k]) for k in ("producers", "consumers", "keepers"))
            )
            for t in data["tensors"]
        ),
        channels={str(op): int(count) for op, count in data["channels"].items()},
        settings={name: Setting(**said) for name, said in data["settings"].items()},
        machine=Machine(**machine),
        versions=dict(data["versions"]),
    )


def ending_to_dict(ending: Ending) -> dict[str, Any]:
    """An ending as plain lists, dicts, numbers and strings."""
    return {
        "ended": ending.ended,
        "met": ending.met,
        "plan": ending.plan.to_dict(),
        "report": ending.report.to_dict(),
        "chosen": ending.chosen,
        "finalists": [trial.to_dict() for trial in ending.finalists],
        "predicted": {str(number): share for number, share in ending.predicted.items()},
        "baseline_times": dict(ending.baseline_times),
        "result_times": dict(ending.result_times),
        "conversions": [asdict(conversion) for conversion in ending.conversions],
    }


def ending_from_dict(data: Mapping[str, Any]) -> Ending:
    """Read back what `ending_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the end of a run", _ending, data)


def _ending(data: Mapping[str, Any]) -> Ending:
    return Ending(
        data["ended"],
        data["met"],
        PrecisionPlan.from_dict(data["plan"]),
        Report.from_dict(data["report"]),
        data["chosen"],
        tuple(Trial.from_dict(trial) for trial in data["finalists"]),
        {int(number): share for number, share in data["predicted"].items()},
        dict(data["baseline_times"]),
        dict(data["result_times"]),
        tuple(
            Conversion(c["source"], tuple(c["readers"]), c["kind"], c["seconds"])
            for c in data["conversions"]
        ),
    )


def record_to_dict(record: RunRecord) -> dict[str, Any]:
    """A whole record as plain lists, dicts, numbers and strings."""
    return {
        "setup": setup_to_dict(record.setup),
        "name": record.name,
        "baseline": None if record.baseline is None else dict(record.baseline),
        "observations": record.observations.to_dict(),
        "trials": [trial.to_dict() for trial in record.trials],
        "times": record.measured.times.to_dict(),
        "arriving": dict(record.measured.arriving),
        "values": dict(record.measured.values),
        "ending": None if record.ending is None else ending_to_dict(record.ending),
    }


def record_from_dict(data: Mapping[str, Any]) -> RunRecord:
    """Read back what `record_to_dict` wrote.

    Raises:
        HistoryError: it was not written so.
    """
    return _read("the record of a run", _record, data)


def _record(data: Mapping[str, Any]) -> RunRecord:
    return RunRecord(
        _setup(data["setup"]),
        data["name"],
        data["baseline"],
        Observations.from_dict(data["observations"]),
        tuple(Trial.from_dict(trial) for trial in data["trials"]),
        Measured(Times.from_dict(data["times"]), dict(data["arriving"]), dict(data["values"])),
        None if data["ending"] is None else _ending(data["ending"]),
    )


def _read(what: str, reader: Callable[[Mapping[str, Any]], T], data: Mapping[str, Any]) -> T:
    try:
        return reader(data)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise HistoryError(
            f"{what} cannot be read: {type(error).__name__}: {error}; it was damaged, or written "
            f"by another version"
        ) from None


def conversions_of(
    graph: OpGraph, flow: QuantizationFlow, seconds: Mapping[str, float]
) -> tuple[Conversion, ...]:
    """Where values change their type under a plan.

    Args:
        graph: the model.
        flow: what follows from the plan.
        seconds: op, or conversion by a name of its own → seconds of one run; a conversion bears
            the name of what it converts, with a word behind a slash.
    """
    found = []
    for name in (*graph.inputs, *(op.name for op in graph)):
        for kind, readers in _converted_for(graph, flow, name).items():
            taken = [
                value
                for said, value in seconds.items()
                if said.startswith(f"{name}/") and said not in graph
            ]
            found.append(Conversion(name, tuple(readers), kind, sum(taken) if taken else None))
    return tuple(found)


def _converted_for(graph: OpGraph, flow: QuantizationFlow, name: str) -> dict[str, list[str]]:
    """Kind of conversion → the ops that read a tensor converted so."""
    found: dict[str, list[str]] = {}
    written = flow.effective.get(name, Precision.FP32)
    for reader in graph.consumer_names(name):
        quantized = name in flow.int8_reads.get(reader, ())
        if quantized != (name in flow.int8_outputs):
            found.setdefault("quantize" if quantized else "dequantize", []).append(reader)
        elif not quantized:
            runs = flow.effective[reader]
            low = {p for p in (written, runs) if p.is_16_bit}
            if low and written is not runs and Precision.INT8 not in (written, runs):
                found.setdefault("cast", []).append(reader)
    return found


def shown(trials: Sequence[Trial], latest: Sequence[Trial]) -> tuple[Trial, ...]:
    """Trials in their order, each with its latest figures."""
    newer = {trial.number: trial for trial in latest}
    return tuple(newer.get(trial.number, trial) for trial in trials)
