"""Training of a simulation: epochs, budget, the best checkpoint, and resumption."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.simulation import EPOCHS, OptimizerChoice, Trainer, TrainingSchedule
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import ConfigurationError, DataError, TrainingError
from neural_mp.io.files import write_atomic
from neural_mp.io.readers import prefix_file_errors, read_file_bytes, read_json
from neural_mp.util.json_fields import Count, Finite, JsonFields
from neural_mp.util.validators import (
    boolean,
    file_path,
    finite,
    integer_between,
    optional,
    positive_float,
    validate_option,
)

logger = logging.getLogger(__name__)

#: Learning rate at the start; the logarithm of a scale changes by about as much in a step.
LEARNING_RATE = 5e-4
_PROGRESS = "training.json"
_OTHER_FOLDER = "use another folder"
#: Largest state that is read.
_MAX_STATE_BYTES = 1 << 38
#: Score before training without an evaluation: below all others, and finite in JSON.
_LEAST = -sys.float_info.max


@dataclass(frozen=True)
class TrainingProgress(JsonFields):
    """Progress of a training.

    Attributes:
        losses: mean loss of each epoch.
        scores: accuracy before training and after each epoch; minus the loss without an evaluation,
            then with the lowest number before training.
        best: number of epochs after which the score was best.
        complete: whether all epochs were run; False if the budget ended first.
    """

    optional_keys: ClassVar[Collection[str] | None] = ()

    losses: tuple[Finite, ...] = ()
    scores: tuple[Finite, ...] = ()
    best: Count = 0
    complete: bool = False

    @property
    def epochs(self) -> int:
        """Number of epochs so far."""
        return len(self.losses)

    def after(self, loss: float, score: float, higher_is_better: bool) -> TrainingProgress:
        """Return the progress after another epoch."""
        best_score, sign = self.scores[self.best], 1 if higher_is_better else -1
        best = self.epochs + 1 if sign * score > sign * best_score else self.best
        return TrainingProgress((*self.losses, loss), (*self.scores, score), best)


def fit(
    model: Any,
    batches: Iterable[Any],
    loss: Callable[[Any, Any], Any] | None = None,
    *,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    optimizer: OptimizerChoice | None = None,
    evaluate: Callable[[Any], float] | None = None,
    higher_is_better: bool = True,
    seconds: float | None = None,
    folder: str | Path | None = None,
) -> TrainingProgress:
    """Train a model made by `quantization_aware`; afterwards it has the weights of the best epoch.

    With a folder, the state after each epoch is stored there, and a call with the same folder
    continues after the last complete epoch, also if the process was killed.

    Args:
        model: the simulation; changed in place.
        batches: batches that can be read once per epoch: `(inputs, targets)` with a loss, else
            inputs.
        loss: a function of outputs and targets; for Keras, a Keras loss or a function of targets
            and outputs. Default: self-distillation, which trains the outputs towards those of the
            FP32 model and requires no labels.
        epochs: number of passes over the batches.
        learning_rate: learning rate of the first epoch; decays to 0 along half a cosine.
        optimizer: an optimizer by name; default: Adam.
        evaluate: function of the simulation in inference mode that returns its accuracy, which
            chooses the best epoch. Default: the mean loss of the epoch.
        higher_is_better: direction of `evaluate`.
        seconds: budget; training ends at the first step after it.
        folder: folder for checkpoints; None to keep none.

    Raises:
        ConfigurationError: an option is invalid, or the folder has checkpoints of another model.
        DataError: there are no batches, or a batch does not fit the model.
        TrainingError: the loss is NaN or Inf. The model has the weights of the best epoch.
    """
    validate_option("epochs", integer_between(1), epochs)
    validate_option("learning_rate", positive_float, learning_rate)
    validate_option("seconds", optional(positive_float), seconds)
    validate_option("higher_is_better", boolean, higher_is_better)
    if loss is not None and not callable(loss):
        raise ConfigurationError(f"loss must be a function of outputs and targets, got {loss!r}")
    if isinstance(batches, Iterator):
        raise DataError("batches must be readable once per epoch, got an iterator; give a list")
    if not isinstance(getattr(model, "schedule", None), TrainingSchedule):
        raise ConfigurationError(
            f"fit requires a model made by quantization_aware, got a {type(model).__name__}"
        )
    adaptor = adaptor_for(model)
    offered = require_part(adaptor.simulation, adaptor.framework, "training with a plan")
    trainer = offered.trainer(model, loss, optimizer or OptimizerChoice())
    checkpoints = _Checkpoints(
        None if folder is None else validate_option("folder", file_path, folder)
    )
    end = math.inf if seconds is None else time.monotonic() + seconds
    progress = checkpoints.resume_training(trainer)
    if progress is None:
        score = _LEAST if evaluate is None else _evaluate_score(evaluate, model)
        progress, checkpoints.best = TrainingProgress(scores=(score,)), trainer.save_state()
    try:
        while progress.epochs < epochs and time.monotonic() < end:
            rate = learning_rate * 0.5 * (1 + math.cos(math.pi * progress.epochs / epochs))
            mean, in_time = _train_epoch(trainer, batches, rate, progress.epochs + 1, end)
            score = -mean if evaluate is None else _evaluate_score(evaluate, model)
            progress = progress.after(mean, score, higher_is_better or evaluate is None)
            progress = replace(progress, complete=in_time and progress.epochs == epochs)
            checkpoints.store_state(progress, trainer.save_state())
            logger.info("Epoch %d of %d: loss %.4g.", progress.epochs, epochs, mean)
    finally:
        trainer.load_state(checkpoints.best)
    return progress


def _evaluate_score(evaluate: Callable[[Any], float], model: object) -> float:
    return validate_option("the result of evaluate", finite, evaluate(model))


def _train_epoch(
    trainer: Trainer, batches: Iterable[Any], rate: float, epoch: int, end: float
) -> tuple[float, bool]:
    """Return the mean loss of an epoch, and whether it ended within the budget."""
    losses: list[float] = []
    for batch in batches:
        losses.append(trainer.step(batch, rate))
        if not math.isfinite(losses[-1]):
            origin = trainer.first_non_finite(batch) or "the loss or a gradient"
            raise TrainingError(
                f"the loss is {losses[-1]} in step {len(losses)} of epoch {epoch}; the first "
                f"NaN or Inf is {origin}; lower the learning rate ({rate:.3g}). The model has the "
                f"weights of its best epoch"
            )
        if time.monotonic() >= end:
            return sum(losses) / len(losses), False
    if not losses:
        raise DataError("training requires batches, got none")
    return sum(losses) / len(losses), True


class _Checkpoints:
    """The states of the latest and the best epoch in a folder, each in a file of its own.

    `training.json` names the latest complete epoch and is written last, so a kill at any moment
    leaves both states of the epoch that the file names.

    Attributes:
        best: the state of the best epoch.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.best = b""

    def resume_training(self, trainer: Trainer) -> TrainingProgress | None:
        """Restore the latest complete epoch, and return its progress; None without any."""
        if self.folder is None or not (self.folder / _PROGRESS).is_file():
            return None
        read = TrainingProgress.from_dict
        progress = read_json(self.folder / _PROGRESS, read, ConfigurationError, _OTHER_FOLDER)
        states = []
        for epoch in (progress.epochs, progress.best):
            file = self._get_state_file(epoch)
            with prefix_file_errors(repr(str(file)), ConfigurationError, _OTHER_FOLDER):
                states.append(read_file_bytes(file, _MAX_STATE_BYTES))
        trainer.load_state(states[0], resume=True)
        self.best = states[1]
        return progress

    def store_state(self, progress: TrainingProgress, state: bytes) -> None:
        """Store the state after an epoch, and delete states that are neither latest nor best."""
        if progress.best == progress.epochs:
            self.best = state
        if self.folder is None:
            return
        write_atomic(self._get_state_file(progress.epochs), state)
        content = json.dumps(progress.to_dict(), indent=1).encode()
        write_atomic(self.folder / _PROGRESS, content)
        retained = {self._get_state_file(progress.epochs), self._get_state_file(progress.best)}
        for file in self.folder.glob("epoch_*.state"):
            if file not in retained:
                file.unlink(missing_ok=True)

    def _get_state_file(self, epoch: int) -> Path:
        assert self.folder is not None
        return self.folder / f"epoch_{epoch}.state"
