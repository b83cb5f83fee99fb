"""Training within a search: the options of `MixedPrecision` as a function of model and plan."""

from __future__ import annotations

import hashlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.common.training_choices import LossChoice, OptimizerChoice
from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel, LoadedModel
from neural_mp.api import config_objects
from neural_mp.api.quantization_aware import untrainable
from neural_mp.config import Options, Settings
from neural_mp.config.training import TRAIN
from neural_mp.errors import ConfigurationError
from neural_mp.space import ResolvedPlan
from neural_mp.training.loop import LEARNING_RATE, fit
from neural_mp.tuning.job import TuningJob
from neural_mp.util.user_calls import call_user

#: Time limit of a training that begins at the limit, which ends after one step.
_LEAST_SECONDS = 1e-3
#: Folder of the checkpoints in a workspace.
TRAINING_FOLDER = "training"


@dataclass(frozen=True)
class _Wanted:
    """The training that options and tuning file request; Python overrides the file.

    Attributes:
        batches: batches for the loss; None to train on the calibration batches.
        loss: function of outputs and targets, in the framework's order; None without labels.
        optimizer: optimizer by name; None for the default.
    """

    batches: Any = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: OptimizerChoice | None = None
    learning_rate: float = LEARNING_RATE


@dataclass(frozen=True, eq=False)
class _FirstBatches:
    """The first batches of a loader, in each pass."""

    loader: Iterable[Any]
    most: int

    def __iter__(self) -> Iterator[Any]:
        return islice(self.loader, self.most)


def with_training(job: TuningJob, given: Options, settings: Settings) -> TuningJob:
    """Return the job with the training that the options or the tuning file request, if any.

    Raises:
        ConfigurationError: an option is invalid, or the framework of the model cannot be trained.
        DataError: the data that the file names are missing or invalid.
    """
    requested = given.train_func is not None or given.train_dataloader is not None
    if not requested and not given.exit_policy.train_seconds and settings.train is None:
        return job
    if given.train_func is not None and not callable(given.train_func):
        raise ConfigurationError(
            f"train_func must be a function that trains a model, got {given.train_func!r}"
        )
    adaptor = job.model.adaptor
    if adaptor.simulation is None:
        raise ConfigurationError(
            f"{untrainable(adaptor.framework)}, or remove train_func, train_dataloader, "
            f"exit_policy.train_seconds and quantization.train, as a search reconstructs by itself"
        )
    setup = _wanted(given, settings, adaptor.simulation.loss)
    if (setup.batches is None) != (setup.loss is None):
        raise ConfigurationError(
            "train_dataloader and loss, a function of outputs and targets, must be set together, "
            "in Python or as dataloader and loss of quantization.train; set both, or only "
            "exit_policy.train_seconds to train without labels"
        )
    return replace(job, train=_training(given, setup, adaptor.simulation.finished))


def _wanted(
    given: Options,
    settings: Settings,
    named_loss: Callable[[LossChoice], Callable[[Any, Any], Any]],
) -> _Wanted:
    batches, loss, file = given.train_dataloader, given.loss, settings.train
    if file is None or given.train_func is not None:
        return _Wanted(batches, loss)
    if batches is None:
        batches = config_objects.loader(settings, TRAIN)
    if batches is not None and file.max_batches is not None:
        batches = _FirstBatches(batches, file.max_batches)
    with settings.source.at((*TRAIN, "loss")):
        for name, options in (file.loss or {}).items():
            loss = loss or named_loss(LossChoice(name, **options))
    for name, options in (file.optimizer or {}).items():
        rate = options.get("learning_rate", LEARNING_RATE)
        rest = {key: value for key, value in options.items() if key != "learning_rate"}
        return _Wanted(batches, loss, OptimizerChoice(name, rest), rate)
    return _Wanted(batches, loss)


def _training(
    given: Options, setup: _Wanted, finished: Callable[[Any], Any]
) -> Callable[[AnyTunableModel, ResolvedPlan, float], AnyModel]:
    """Return FP32 model, plan, seconds → the trained, converted model."""

    def train(model: AnyTunableModel, plan: ResolvedPlan, seconds: float) -> AnyModel:
        end = time.monotonic() + seconds
        simulation = model.simulated(plan, TrainingSchedule())
        if given.train_func is not None:
            call_user(given.train_func, simulation, form="train_func(model)")
        else:
            remaining = max(end - time.monotonic(), _LEAST_SECONDS)
            _fit(given, setup, model, plan, simulation, remaining)
        return LoadedModel(model.adaptor, finished(simulation), boundary=model.boundary)

    return train


def _fit(
    given: Options,
    setup: _Wanted,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    simulation: Any,
    seconds: float,
) -> None:
    """Train in the loop of this package, with checkpoints in the workspace."""
    batches = setup.batches
    if batches is None:
        if model.data is None:
            raise ConfigurationError(
                "training without labels requires calibration data, got none; set "
                "calib_dataloader or train_dataloader"
            )
        batches = list(model.data())
    name = plan_digest(model, plan, setup.optimizer)
    folder = Path(given.workspace) / TRAINING_FOLDER / name
    if not given.resume:
        shutil.rmtree(folder, ignore_errors=True)
    budget = min(given.exit_policy.train_seconds or math.inf, seconds)
    fit(
        simulation,
        batches,
        setup.loss,
        epochs=given.epochs,
        learning_rate=setup.learning_rate,
        optimizer=setup.optimizer,
        seconds=None if math.isinf(budget) else budget,
        folder=folder,
    )


def plan_digest(
    model: AnyTunableModel, plan: ResolvedPlan, optimizer: OptimizerChoice | None
) -> str:
    """Return the name of the checkpoints of a model, a plan and an optimizer."""
    text = f"{model.fingerprint} {plan.plan.to_yaml()}"
    if optimizer is not None:
        text += f" {optimizer.name} {sorted(optimizer.options.items())}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]
