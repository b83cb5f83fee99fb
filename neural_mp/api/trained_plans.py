"""Training within a search: the options of `MixedPrecision` as a function of model and plan."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel, LoadedModel
from neural_mp.api.quantization_aware import untrainable
from neural_mp.errors import ConfigurationError
from neural_mp.space import ResolvedPlan
from neural_mp.training.loop import fit
from neural_mp.tuning.job import TuningJob
from neural_mp.util.user_calls import call_user

if TYPE_CHECKING:
    from neural_mp.api.mixed_precision import MixedPrecision

#: Time limit of a training that begins at the limit, which ends after one step.
_LEAST_SECONDS = 1e-3
#: Folder of the checkpoints in a workspace.
TRAINING_FOLDER = "training"


def with_training(job: TuningJob, given: MixedPrecision) -> TuningJob:
    """Return the job with the training that the options request, if any.

    Raises:
        ConfigurationError: an option is invalid, or the framework of the model cannot be trained.
    """
    seconds = given.exit_policy.train_seconds
    if given.train_func is None and given.train_dataloader is None and not seconds:
        return job
    if given.train_func is not None and not callable(given.train_func):
        raise ConfigurationError(
            f"train_func must be a function that trains a model, got {given.train_func!r}"
        )
    if (given.train_dataloader is None) != (given.loss is None):
        raise ConfigurationError(
            "train_dataloader and loss, a function of outputs and targets, must be set together; "
            "set both, or only exit_policy.train_seconds to train without labels"
        )
    adaptor = job.model.adaptor
    if adaptor.simulation is None:
        raise ConfigurationError(
            f"{untrainable(adaptor.framework)}, or remove train_func, train_dataloader and "
            f"exit_policy.train_seconds, as a search reconstructs by itself"
        )
    return replace(job, train=_training(given, adaptor.simulation.finished))


def _training(
    given: MixedPrecision, finished: Callable[[Any], Any]
) -> Callable[[AnyTunableModel, ResolvedPlan, float], AnyModel]:
    """Return FP32 model, plan, seconds → the trained, converted model."""

    def train(model: AnyTunableModel, plan: ResolvedPlan, seconds: float) -> AnyModel:
        end = time.monotonic() + seconds
        simulation = model.simulated(plan, TrainingSchedule())
        if given.train_func is not None:
            call_user(given.train_func, simulation, form="train_func(model)")
        else:
            _fit(given, model, plan, simulation, max(end - time.monotonic(), _LEAST_SECONDS))
        return LoadedModel(model.adaptor, finished(simulation), boundary=model.boundary)

    return train


def _fit(
    given: MixedPrecision,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    simulation: Any,
    seconds: float,
) -> None:
    """Train in the loop of this package, with checkpoints in the workspace."""
    batches = given.train_dataloader
    if batches is None:
        if model.data is None:
            raise ConfigurationError(
                "training without labels requires calibration data, got none; set "
                "calib_dataloader or train_dataloader"
            )
        batches = list(model.data())
    name = plan_digest(model, plan)
    folder = Path(given.workspace) / TRAINING_FOLDER / name
    if not given.resume:
        shutil.rmtree(folder, ignore_errors=True)
    budget = min(given.exit_policy.train_seconds or math.inf, seconds)
    fit(
        simulation,
        batches,
        given.loss,
        epochs=given.epochs,
        seconds=None if math.isinf(budget) else budget,
        folder=folder,
    )


def plan_digest(model: AnyTunableModel, plan: ResolvedPlan) -> str:
    """Return the name of the checkpoints of a model and a plan."""
    return hashlib.sha256(f"{model.fingerprint} {plan.plan.to_yaml()}".encode()).hexdigest()[:16]
