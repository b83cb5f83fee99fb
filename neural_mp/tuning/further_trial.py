"""A further trial of a finished run: an edited plan, predicted from the record, or evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from neural_mp.adaptors.loaded_model import AnyTunableModel
from neural_mp.core.criterion import Deadline
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import Granularity, QuantDType, QuantSpec, Scheme
from neural_mp.core.trial import Trial
from neural_mp.errors import PlanError, UnknownOperatorError, did_you_mean
from neural_mp.runs.report import NO_CORRECTION, RunRecord
from neural_mp.search.corrections import rescale_noise_estimates
from neural_mp.space import Capability, TuningSpace
from neural_mp.tuning.baseline import calibrate_model, obtain_measured_baseline
from neural_mp.tuning.evaluation.early_stopping import RunningValues
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluator
from neural_mp.tuning.evaluation.sharding import ShardingPolicy
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.recording import predict_latency
from neural_mp.tuning.trial_runner import TrialRunner

#: Stands for the configuration of an op that no plan of the run has in static INT8.
_STATIC = OpConfig(
    Precision.INT8,
    activation=QuantSpec(QuantDType.UINT8, Scheme.ASYMMETRIC, Granularity.PER_TENSOR),
)


def list_plans(record: RunRecord) -> tuple[PrecisionPlan, ...]:
    """Return the plans of a run: that of the result, then those of the trials, latest first."""
    ending = () if record.ending is None else (record.ending.plan,)
    return (*ending, *(trial.plan for trial in reversed(record.trials)))


def edit_plan(
    space: TuningSpace,
    plan: PrecisionPlan,
    edits: Mapping[str, Precision],
    earlier: Iterable[PrecisionPlan] = (),
) -> PrecisionPlan:
    """Return a plan with ops in other precisions.

    An op has its configuration in the first of the `earlier` plans that has the op in this
    precision, with its calibration and corrections; else its best configuration.

    Raises:
        UnknownOperatorError: the model has no such op.
        PlanError: an op does not support the precision.
    """
    plans, changes = tuple(earlier), {}
    for op, precision in edits.items():
        if op not in space.capabilities:
            raise UnknownOperatorError(
                f"the model has no op {op!r}{did_you_mean(op, space.capabilities)}"
            )
        capability = space.capabilities[op]
        best = capability.config(precision)
        if best is None:
            raise PlanError(
                f"{op!r} must run in {', '.join(map(str, capability.precisions))}, got "
                f"{precision}: {capability.refusal_reason(precision)}"
            )
        if precision is Precision.INT8:
            best = OpConfig(precision)  # the conversion chooses the details
        changes[op] = _find_config(plans, op, precision) or best
    return plan.replacing(changes)


def _find_config(plans: Iterable[PrecisionPlan], op: str, precision: Precision) -> OpConfig | None:
    configs = (plan[op] for plan in plans if op in plan)
    return next((config for config in configs if config.precision is precision), None)


def restore_space(record: RunRecord) -> TuningSpace:
    """Return the space of a run, as far as its record holds it.

    Ops that no plan decides have FP32 alone. Configurations are those of the plans of the run, else
    without details of ranges and weights.
    """
    setup, plans = record.setup, list_plans(record)
    static = {op for tensor in setup.tensors for op in tensor.ops | {*tensor.quantizing_ops}}

    def restore_config(op: str, precision: Precision) -> OpConfig:
        is_static = precision is Precision.INT8 and op in static
        default = _STATIC if is_static else OpConfig(precision)
        return _find_config(plans, op, precision) or default

    capabilities = {op.name: Capability() for op in setup.graph}
    for op in setup.tunable_ops:
        stored = setup.capabilities[op]
        lowered = [restore_config(op, p) for p in stored.precisions if p is not Precision.FP32]
        capabilities[op] = replace(stored, configs=(*lowered, FP32))
    return TuningSpace(setup.graph, capabilities)


@dataclass(frozen=True)
class Prediction:
    """Figures of a plan, predicted from the measurements of a run by the models of its search.

    Noises of quantized tensors add up. They are those at the outputs, as far as the run measured
    any tensor there, else those of the tensors themselves: then, only their ratio counts.

    Attributes:
        time: time of a batch as a fraction of FP32's; None if the run timed no ops.
        nsr, nsr_before: NSR of the edited plan, and of the plan before.
        tensors, measured: number of quantized tensors, and of these, those with noise measured at
            the outputs; the others are scaled by the median ratio.
        followers: op that the edits do not name → its precisions before and after.
    """

    time: float | None
    nsr: float
    nsr_before: float
    tensors: int
    measured: int
    followers: Mapping[str, tuple[Precision, Precision]]


def predict_plan(
    record: RunRecord, plan: PrecisionPlan, edits: Mapping[str, Precision]
) -> Prediction:
    """Predict time and noise of an edited plan; no model and no data are needed.

    Raises:
        NeuralMPError: as for `edit_plan`.
    """
    space = restore_space(record)
    edited = edit_plan(space, plan, edits, list_plans(record))
    keys_before, keys = (_list_noises(record, candidate) for candidate in (plan, edited))
    measured = {
        _make_noise_key(name, correction): nsr
        for name, by_correction in record.measured.output_nsr.items()
        for correction, nsr in by_correction.items()
    }
    estimates = _collect_tensor_noise(record)
    exact = {key: nsr for key, nsr in measured.items() if key in estimates}
    noise = rescale_noise_estimates(estimates, exact)
    flows = [record.setup.follow_plan(candidate).effective for candidate in (plan, edited)]
    return Prediction(
        predict_latency(space, record.observations, record.measured.times, edited),
        sum(noise.get(key, 0.0) for key in keys),
        sum(noise.get(key, 0.0) for key in keys_before),
        len(keys),
        sum(key in exact for key in keys),
        {
            op: (flows[0][op], flows[1][op])
            for op in flows[1]
            if op not in edits and flows[0][op] is not flows[1][op]
        },
    )


def _make_noise_key(tensor: str, correction: str) -> str:
    return f"{correction}: {tensor}"


def _collect_tensor_noise(record: RunRecord) -> dict[str, float]:
    """Return the NSR of every quantized tensor with every correction, as observed."""
    observations = record.observations
    noise = {_make_noise_key(name, NO_CORRECTION): nsr for name, nsr in observations.nsr.items()}
    for name, by_correction in observations.corrected_nsr.items():
        noise |= {_make_noise_key(name, c): nsr for c, nsr in by_correction.items()}
    return noise


def _list_noises(record: RunRecord, plan: PrecisionPlan) -> list[str]:
    """Return the key of every tensor that is quantized under a plan, with its correction.

    A tensor keeps the correction of its readers only while one of them runs in INT8.
    """
    effective = record.setup.follow_plan(plan).effective
    keys = []
    for tensor in record.setup.tensors:
        in_int8 = [op for op in tensor.quantizing_ops if effective[op] is Precision.INT8]
        corrected = record.observations.corrected_nsr.get(tensor.name, {})
        readers = (plan[op] for op in tensor.consumers if op in in_int8 and op in plan)
        used = (c for config in readers for c in config.corrections if c in corrected)
        if in_int8:
            keys.append(_make_noise_key(tensor.name, next(used, NO_CORRECTION)))
    return keys


def try_further_plan(
    job: TuningJob, log: RunLog, plan: PrecisionPlan, edits: Mapping[str, Precision]
) -> tuple[Trial, AnyTunableModel]:
    """Evaluate an edited plan as a further trial of the run that the job continues.

    The result of the run and its settings stay as they are. Accuracy is evaluated on all of the
    data. A plan that the run has tried before is not evaluated again.

    Returns:
        The trial, and the FP32 model with the observations of the run.

    Raises:
        NeuralMPError: an edit does not fit the model, or the run cannot be continued.
    """
    with job.open_history() as history:
        deadline = Deadline()
        baseline = obtain_measured_baseline(job, history, log, deadline)
        model = calibrate_model(job, log, deadline, history)
        job = job.in_space(model.space)
        record = history.read_record()
        resolved = job.space.resolve(edit_plan(job.space, plan, edits, list_plans(record)))
        same = next((trial for trial in record.trials if trial.plan == resolved.plan), None)
        if same is not None:
            return same, model
        evaluator = PlanEvaluator(
            model,
            job.evaluator,
            job.settings.criterion,
            baseline.accuracy,
            RunningValues(),
            job.measurement.inputs,
            baseline.reserved_seconds,
        )
        sharding = ShardingPolicy(
            job.evaluator, baseline.seconds, baseline.cpu_seconds, log.add_warning
        )
        runner = TrialRunner(job, history, log, deadline, evaluator, sharding)
        (trial,) = runner.run_plans([resolved], len(record.trials) + 1)
        return trial, model
