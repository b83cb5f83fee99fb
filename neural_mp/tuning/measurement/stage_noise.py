"""Measurement of the noise of a plan's results with the weights of each stage of recovery."""

from __future__ import annotations

from dataclasses import replace

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.runs.stage_noise import Stage, StageNoise
from neural_mp.search.corrections import rounded_to_nearest
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.comparison import Comparison, compare_models

#: Samples are enough for the noise of whole tensors.
_SAMPLES = 64


def stage_noise(
    job: TuningJob,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    log: RunLog,
    trained: AnyModel | None = None,
) -> StageNoise | None:
    """Return the noise of a plan's results at each stage of its weights.

    Args:
        job: the run.
        model: the calibrated FP32 model.
        plan: the plan.
        log: receives the duration.
        trained: the converted model after training, if any.

    Returns:
        The noise; None with one stage only, without calibration data, or if the framework does not
        expose results of single ops.
    """
    nearest = rounded_to_nearest(plan.plan)
    is_reconstructed = nearest != plan.plan
    has_stages = is_reconstructed or trained is not None
    if not has_stages or job.calibration is None or model.adaptor.op_outputs is None:
        return None
    with log.phase("compare", "Comparing with FP32"):
        models = {Stage.NEAREST: model.converted(job.space.resolve(nearest))}
        if is_reconstructed:
            models[Stage.RECONSTRUCTED] = model.converted(plan)
        if trained is not None:
            models[Stage.TRAINED] = trained
        few = replace(job.calibration, samples=min(job.calibration.samples, _SAMPLES))
        rescaled = model.rescaled_by(plan.plan)
        comparisons = {
            stage: compare_models(job.model, staged, few.inputs(), rescaled)
            for stage, staged in models.items()
        }
    return _stage_noise(plan, comparisons)


def _stage_noise(plan: ResolvedPlan, comparisons: dict[Stage, Comparison]) -> StageNoise:
    by_stage = {stage.value: _nsr_by_op(comparison) for stage, comparison in comparisons.items()}
    outputs = {
        stage.value: max((output.noise for output in comparison.outputs), default=0.0)
        for stage, comparison in comparisons.items()
    }
    ops = {
        op: {stage: noise[op] for stage, noise in by_stage.items() if op in noise}
        for op in plan.plan
    }
    samples = min(comparison.samples for comparison in comparisons.values())
    return StageNoise({op: by for op, by in ops.items() if by}, outputs, samples)


def _nsr_by_op(comparison: Comparison) -> dict[str, float]:
    return {
        name: layer.noise
        for layer in comparison.layers
        for name in (layer.name, *(fused for fused, _ in layer.fused_ops))
    }
