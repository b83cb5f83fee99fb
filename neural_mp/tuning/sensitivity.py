"""Sensitivity of each decision of a plan, with its gain in time and its reason."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from neural_mp.core.observations import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, QuantizedTensor
from neural_mp.io.measurement_cache import RunCache
from neural_mp.runs.record import (
    NO_CORRECTION,
    ProbeMeasurements,
    RunRecord,
    RunStart,
    output_nsr_in,
)
from neural_mp.search.corrections import best_corrections, with_corrections
from neural_mp.space import TuningSpace, why_int8
from neural_mp.tuning.baseline import calibrated
from neural_mp.tuning.evaluator import Deadline
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.probe import MeasuringProbe
from neural_mp.tuning.recording import setup_of


@dataclass(frozen=True)
class Sensitivity:
    """One decision: quantization of a tensor, or an op in a lower precision.

    Noise is an NSR: 0.01 is 20 dB.

    Attributes:
        name: the op or graph input that writes the tensor; or the op.
        kind: `tensor` or `op`.
        ops: the ops that fall back together.
        noise: NSR of the tensor in INT8; None without observations.
        repair: the correction that removes most noise; None if none removes half of it.
        repaired_noise: NSR after the correction.
        output_noise: NSR at the outputs if only this decision is in lower precision; None if not
            measured.
        repaired_output_noise: output noise after the correction.
        seconds_gained: saved seconds per run of the batch in the ops that read the tensor; None
            without op timings.
        runs_in: precision under the plan.
        reason: reason for this precision.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    noise: float | None = None
    repair: str | None = None
    repaired_noise: float | None = None
    output_noise: float | None = None
    repaired_output_noise: float | None = None
    seconds_gained: float | None = None
    runs_in: str = Precision.FP32.value
    reason: str = ""

    @property
    def harm(self) -> tuple[float, float]:
        """Sort key: output noise, then the NSR of the tensor, each after correction.

        The two are not comparable: decisions without measured output noise come last.
        """
        outputs = (self.repaired_output_noise, self.output_noise)
        inside = (self.repaired_noise, self.noise)
        at_outputs, arising = (
            next((noise for noise in known if noise is not None), -1.0)
            for known in (outputs, inside)
        )
        return at_outputs, arising

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
        return {**asdict(self), "ops": list(self.ops)}


@dataclass(frozen=True)
class SensitivityReport:
    """The decisions of a model, most sensitive first.

    Attributes:
        rows: the decisions.
    """

    rows: tuple[Sensitivity, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Sensitivity]:
        return iter(self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a JSON-compatible list."""
        return [row.to_dict() for row in self.rows]

    def to_csv(self) -> str:
        """Return CSV with a header, compatible with spreadsheet programs."""
        text = io.StringIO()
        names = [item.name for item in fields(Sensitivity)]
        writer = csv.DictWriter(text, names, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            writer.writerow({**asdict(row), "ops": " ".join(row.ops)})
        return text.getvalue()


def sensitivities(record: RunRecord, plan: PrecisionPlan | None = None) -> SensitivityReport:
    """Return the decisions of a run, as far as measured.

    Args:
        record: the stored run.
        plan: plan for `runs_in`; by default that of the result, or of the latest trial of an
            unfinished run.
    """
    if plan is None:
        plan = record.ending.plan if record.ending else PrecisionPlan()
        if record.ending is None and record.trials:
            plan = record.trials[-1].plan
    flow = record.setup.followed(plan)
    rows = (*_tensors(record, plan, flow), *_ops(record, plan, flow))
    return SensitivityReport(tuple(sorted(rows, key=lambda row: row.harm, reverse=True)))


def _tensors(
    record: RunRecord, plan: PrecisionPlan, flow: QuantizationFlow
) -> Iterator[Sensitivity]:
    seen, repairs = record.observations, best_corrections(record.observations)
    stored = {flow.scale_owner[source] for reads in flow.int8_reads.values() for source in reads}
    for tensor in record.setup.tensors:
        name, repair = tensor.name, repairs.get(tensor.name)
        arriving = record.measured.output_nsr.get(name, {})
        readers = tensor.consumers
        yield Sensitivity(
            name,
            "tensor",
            tensor.quantizing_ops or readers,
            seen.nsr.get(name),
            repair,
            seen.corrected_nsr[name][repair] if repair else None,
            arriving.get(NO_CORRECTION),
            arriving.get(repair) if repair else None,
            _gained(record.measured.times, readers, (Precision.INT8,)),
            Precision.INT8.value if name in stored else _others(flow, readers),
            _why_tensor(record.setup, plan, flow, tensor, name in stored),
        )


def _others(flow: QuantizationFlow, ops: Sequence[str]) -> str:
    """Return the precisions of ops that do not read a tensor in INT8."""
    found = {flow.effective[op] for op in ops} - {Precision.INT8}
    return min(found, key=lambda p: p.bits).value if found else Precision.FP32.value


def _why_tensor(
    setup: RunStart,
    plan: PrecisionPlan,
    flow: QuantizationFlow,
    tensor: QuantizedTensor,
    stored: bool,
) -> str:
    repairs = dict.fromkeys(
        repair for op in tensor.consumers if op in plan for repair in plan[op].corrections
    )
    if stored:
        return f"repaired: {', '.join(repairs)}" if repairs else "set by the plan"
    said = (
        why_int8(setup.graph, setup.capabilities, plan, flow, op)
        for op in tensor.consumers
        if flow.effective[op] is not Precision.INT8
    )
    return next(said, "no op that reads it does so in INT8")


def _ops(record: RunRecord, plan: PrecisionPlan, flow: QuantizationFlow) -> Iterator[Sensitivity]:
    """Yield the tunable ops that read no quantizable tensor."""
    setup = record.setup
    read = {op for tensor in setup.tensors for op in tensor.consumers}
    for op in setup.tunable_ops:
        if op in read:
            continue
        able = setup.capabilities[op].precisions
        low = tuple(p for p in able if p is not Precision.FP32)
        runs = flow.effective[op]
        reason = "set by the plan" if op in plan else "it follows the ops around it"
        if runs is Precision.FP32:
            reason = why_int8(setup.graph, setup.capabilities, plan, flow, op)
        yield Sensitivity(
            op,
            "op",
            (op,),
            output_noise=record.measured.output_nsr.get(op, {}).get(NO_CORRECTION),
            seconds_gained=_gained(record.measured.times, (op,), low),
            runs_in=runs.value,
            reason=reason,
        )


def _gained(times: OpTimings, ops: Sequence[str], low: Sequence[Precision]) -> float | None:
    """Return the seconds saved by ops in the first of these precisions that was timed."""
    found = []
    for op in ops:
        by: Mapping[Precision, float] = times.ops.get(op, {})
        lower = next((by[precision] for precision in low if precision in by), None)
        if lower is not None and Precision.FP32 in by:
            found.append(by[Precision.FP32] - lower)
    return sum(found) if found else None


def measured_sensitivities(
    job: TuningJob, log: RunLog, most: int | None = None
) -> SensitivityReport:
    """Measure the decisions of a model one by one, without evaluating accuracy.

    Args:
        job: the model with its calibration data.
        log: log with the listener.
        most: number of noisiest tensors whose output noise is measured; all by default.

    Raises:
        DataError: the model does not run on the data.
    """
    try:
        return _measured(job, log, most)
    finally:
        log.listener.close()


def _measured(job: TuningJob, log: RunLog, most: int | None) -> SensitivityReport:
    model = calibrated(job, log, Deadline())
    job, space = job.in_space(model.space), model.space
    cache = RunCache()
    probe = MeasuringProbe(job, model, cache, inf)
    with log.phase("times", "Timing single ops"):
        times = probe.times()
    repairs = best_corrections(model.observations)
    fastest = space.fastest_plan()
    units = _units(space, model.observations.nsr)[:most]
    with log.phase("noise", "Measuring noise at the outputs", len(units)):
        for name, ops in units:
            alone = PrecisionPlan({op: fastest[op] if op in ops else FP32 for op in fastest})
            for plan in dict.fromkeys((alone, with_corrections(alone, space, repairs))):
                probe.output_noise(plan, name)
            log.step()
    measured = ProbeMeasurements(times, output_nsr_in(cache.entries))
    record = RunRecord(setup_of(job), observations=model.observations, measured=measured)
    return sensitivities(record, space.resolve(with_corrections(fastest, space, repairs)).plan)


def _units(space: TuningSpace, noise: Mapping[str, float]) -> list[tuple[str, frozenset[str]]]:
    """Return the units to measure alone, with their ops; noisiest first."""
    tensors = sorted(space.tensors, key=lambda tensor: -noise.get(tensor.name, 0.0))
    read = {op for tensor in tensors for op in tensor.consumers}
    units = [(tensor.name, frozenset(tensor.quantizing_ops)) for tensor in tensors]
    return [*units, *((op, frozenset({op})) for op in space.tunable_ops if op not in read)]
