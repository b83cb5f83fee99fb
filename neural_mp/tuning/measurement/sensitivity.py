"""Sensitivity of each decision of a plan, with its gain in time and its reason."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from math import inf
from typing import Any

from neural_mp.core.criterion import Deadline
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.core.quantization_flow import QuantizationFlow, QuantizedTensor
from neural_mp.io.measurement_cache import RunCache
from neural_mp.runs.report import NO_CORRECTION, ProbeMeasurements, RunRecord, output_nsr_in
from neural_mp.search.corrections import choose_best_corrections, with_corrections
from neural_mp.space import TuningSpace, explain_int8_choice
from neural_mp.space.resolution import BY_PLAN
from neural_mp.tuning.baseline import calibrate_model
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.probe import MeasuringProbe
from neural_mp.tuning.recording import record_run_setup
from neural_mp.util.json_fields import JsonFields
from neural_mp.util.text import Printed, write_table


@dataclass(frozen=True)
class Sensitivity(JsonFields):
    """One decision: quantization of a tensor, or an op in a lower precision.

    Noise is an NSR: 0.01 is 20 dB.

    Attributes:
        name: the op or graph input that writes the tensor; or the op.
        kind: `tensor` or `op`.
        ops: the ops that fall back together.
        noise: NSR of the tensor in INT8; None without observations.
        correction: the correction that removes most noise; None if none removes half of it.
        corrected_noise: NSR after the correction.
        output_noise: NSR at the outputs if only this decision is in lower precision; None if not
            measured.
        corrected_output_noise: output noise after the correction.
        seconds_gained: saved seconds per run of the batch in the ops that read the tensor; None
            without op timings.
        seconds_gained_low, seconds_gained_high: bounds of `seconds_gained`, from the fastest and
            the median runs.
        runs_in: precision under the plan.
        reason: reason for this precision.
    """

    name: str
    kind: str
    ops: tuple[str, ...]
    noise: float | None = None
    correction: str | None = None
    corrected_noise: float | None = None
    output_noise: float | None = None
    corrected_output_noise: float | None = None
    seconds_gained: float | None = None
    seconds_gained_low: float | None = None
    seconds_gained_high: float | None = None
    runs_in: str = Precision.FP32.value
    reason: str = ""

    @property
    def output_nsr(self) -> float | None:
        """Output noise after the correction, if any; None if not measured."""
        corrected = self.corrected_output_noise
        return self.output_noise if corrected is None else corrected

    @property
    def sort_key(self) -> tuple[float, ...]:
        """Output noise, then the NSR of the tensor, each after the correction, if any.

        The two are not comparable: decisions without measured output noise come last.
        """
        nsr = self.noise if self.corrected_noise is None else self.corrected_noise
        return tuple(-1.0 if value is None else value for value in (self.output_nsr, nsr))


@dataclass(frozen=True)
class SensitivityReport(Printed):
    """The decisions of a model, most sensitive first."""

    rows: tuple[Sensitivity, ...]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Sensitivity]:
        return iter(self.rows)

    def to_dict(self) -> list[dict[str, Any]]:
        """Return a JSON-compatible list."""
        return [row.to_dict() for row in self.rows]

    def to_csv(self) -> str:
        """Return CSV with a header, for spreadsheet programs, which run no cell."""
        text = io.StringIO()
        names = [item.name for item in fields(Sensitivity)]
        values = ({**asdict(row), "ops": " ".join(row.ops)} for row in self.rows)
        write_table(text, [names, *([row[name] for name in names] for row in values)])
        return text.getvalue()


def sensitivity_report(record: RunRecord, plan: PrecisionPlan | None = None) -> SensitivityReport:
    """Return the decisions of a run, as far as measured.

    The default of the plan is that of the result, or of the latest trial of an unfinished run.
    """
    if plan is None:
        plan = record.ending.plan if record.ending else PrecisionPlan()
        if record.ending is None and record.trials:
            plan = record.trials[-1].plan
    flow = record.setup.follow_plan(plan)
    rows = (
        *_iterate_tensor_sensitivities(record, plan, flow),
        *_iterate_op_sensitivities(record, plan, flow),
    )
    return SensitivityReport(tuple(sorted(rows, key=lambda row: row.sort_key, reverse=True)))


def _iterate_tensor_sensitivities(
    record: RunRecord, plan: PrecisionPlan, flow: QuantizationFlow
) -> Iterator[Sensitivity]:
    observations, corrections = record.observations, choose_best_corrections(record.observations)
    quantized = {flow.scale_owner[source] for reads in flow.int8_reads.values() for source in reads}
    for tensor in record.setup.tensors:
        name, correction = tensor.name, corrections.get(tensor.name)
        output_nsr = record.measured.output_nsr.get(name, {})
        readers = tensor.consumers
        gained, least, most = _find_saved_seconds(record.measured.times, readers, (Precision.INT8,))
        precision = Precision.INT8
        if name not in quantized:
            others = {flow.effective[op] for op in readers} - {Precision.INT8}
            precision = min(others, key=lambda p: p.bits, default=Precision.FP32)
        yield Sensitivity(
            name,
            "tensor",
            tensor.quantizing_ops or readers,
            observations.nsr.get(name),
            correction,
            observations.corrected_nsr[name][correction] if correction else None,
            output_nsr.get(NO_CORRECTION),
            output_nsr.get(correction) if correction else None,
            gained,
            least,
            most,
            precision.value,
            _explain_tensor_precision(record, plan, flow, tensor, name in quantized),
        )


def _explain_tensor_precision(
    record: RunRecord,
    plan: PrecisionPlan,
    flow: QuantizationFlow,
    tensor: QuantizedTensor,
    quantized: bool,
) -> str:
    corrections = dict.fromkeys(
        name for op in tensor.consumers if op in plan for name in plan[op].corrections
    )
    if quantized:
        learned = _describe_learned_errors(record.measured.layer_errors, plan, tensor.consumers)
        return f"corrected: {', '.join(corrections)}{learned}" if corrections else BY_PLAN
    setup = record.setup
    reasons = (
        explain_int8_choice(setup.graph, setup.capabilities, plan, flow, op)
        for op in tensor.consumers
        if flow.effective[op] is not Precision.INT8
    )
    return next(reasons, "no consumer reads the tensor in INT8")


def _describe_learned_errors(
    errors: Mapping[str, Mapping[str, float]], plan: PrecisionPlan, readers: Sequence[str]
) -> str:
    """Return the errors of layers before and after learning, as the end of a sentence."""
    changes = [
        f"{op} {errors[op]['nearest']:.1e} → {errors[op]['learned']:.1e}"
        for op in readers
        if op in errors and op in plan and plan[op].is_reconstructed
    ]
    return f"; relative error of results: {', '.join(changes)}" if changes else ""


def _iterate_op_sensitivities(
    record: RunRecord, plan: PrecisionPlan, flow: QuantizationFlow
) -> Iterator[Sensitivity]:
    """Yield the tunable ops that read no quantizable tensor."""
    setup = record.setup
    consumers = {op for tensor in setup.tensors for op in tensor.consumers}
    for op in setup.tunable_ops:
        if op in consumers:
            continue
        able = setup.capabilities[op].precisions
        low = tuple(p for p in able if p is not Precision.FP32)
        runs = flow.effective[op]
        reason = BY_PLAN if op in plan else "follows adjacent ops"
        if runs is Precision.FP32:
            reason = explain_int8_choice(setup.graph, setup.capabilities, plan, flow, op)
        gained, least, most = _find_saved_seconds(record.measured.times, (op,), low)
        yield Sensitivity(
            op,
            "op",
            (op,),
            output_noise=record.measured.output_nsr.get(op, {}).get(NO_CORRECTION),
            seconds_gained=gained,
            seconds_gained_low=least,
            seconds_gained_high=most,
            runs_in=runs.value,
            reason=reason,
        )


def _find_saved_seconds(
    times: OpTimings, ops: Sequence[str], low: Sequence[Precision]
) -> tuple[float, float, float] | tuple[None, None, None]:
    """Return the seconds saved by ops in the first of these precisions that was timed.

    Followed by the bounds of these seconds, from the fastest and the median runs.
    """
    gains = []
    for op in ops:
        fp32 = times.op_duration(op, Precision.FP32)
        durations = (times.op_duration(op, precision) for precision in low)
        lower = next((duration for duration in durations if duration is not None), None)
        if lower is not None and fp32 is not None:
            bounds = fp32.low - lower.high, fp32.high - lower.low
            gains.append((fp32.seconds - lower.seconds, *bounds))
    if not gains:
        return None, None, None
    value, least, most = (sum(column) for column in zip(*gains, strict=True))
    return value, least, most


def measure_decision_sensitivities(
    job: TuningJob, log: RunLog, most: int | None = None
) -> SensitivityReport:
    """Measure the decisions of a model one by one, without evaluating accuracy.

    The output noise is measured for the `most` noisiest tensors only; for all by default.

    Raises:
        DataError: the model does not run on the data.
    """
    try:
        return _measure_sensitivities(job, log, most)
    finally:
        log.listener.close()


def _measure_sensitivities(job: TuningJob, log: RunLog, most: int | None) -> SensitivityReport:
    model = calibrate_model(job, log, Deadline())
    job, space = job.in_space(model.space), model.space
    cache = RunCache()
    probe = MeasuringProbe(job, model, cache, inf)
    with log.time_phase("times", "Timing single ops"):
        times = probe.times()
    corrections = choose_best_corrections(model.observations)
    fastest = space.fastest_plan()
    units = _list_measured_units(space, model.observations.nsr)[:most]
    with log.time_phase("noise", "Measuring output noise", len(units)):
        for name, ops in units:
            isolated = PrecisionPlan({op: fastest[op] if op in ops else FP32 for op in fastest})
            for plan in dict.fromkeys((isolated, with_corrections(isolated, space, corrections))):
                probe.output_noise(plan, name)
            log.report_step()
    measured = ProbeMeasurements(times, output_nsr_in(cache.entries))
    record = RunRecord(record_run_setup(job), observations=model.observations, measured=measured)
    return sensitivity_report(
        record, space.resolve(with_corrections(fastest, space, corrections)).plan
    )


def _list_measured_units(
    space: TuningSpace, noise: Mapping[str, float]
) -> list[tuple[str, frozenset[str]]]:
    """Return the units to measure alone, with their ops; noisiest first."""
    tensors = sorted(space.tensors, key=lambda tensor: -noise.get(tensor.name, 0.0))
    consumers = {op for tensor in tensors for op in tensor.consumers}
    units = [(tensor.name, frozenset(tensor.quantizing_ops)) for tensor in tensors]
    return [*units, *((op, frozenset({op})) for op in space.tunable_ops if op not in consumers)]
