"""Section `quantization.train` of a tuning file, in our words and those of INC 1.x → settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.config.inc_dialect import Ignored
from neural_mp.config.settings import TrainSettings
from neural_mp.config.source import KeyPath
from neural_mp.core.enums import Dialect
from neural_mp.errors import ConfigurationError, error_path

#: INC's approach that trains with the section.
TRAINED_APPROACH = "quant_aware_training"
TRAIN: KeyPath = ("quantization", "train")
_UNUSED = f"only the approach {TRAINED_APPROACH} trains"
#: INC's learning rate, if an optimizer has none.
_THEIR_RATE = 1e-3
_THEIR_EPOCHS = 1
#: INC's key → ours.
_NAMES = {"criterion": "loss", "iteration": "max_batches"}


def as_used(content: Mapping[str, Any], ignored: Ignored) -> Mapping[str, Any]:
    """Return the content of a file of INC with its section of training only if INC uses it.

    The approach that requests the training is removed: our search allows all approaches then.
    """
    section = content.get("quantization")
    if not isinstance(section, Mapping) or section.get("train") is None:
        return content
    used = dict(section)
    if used.get("approach") == TRAINED_APPROACH:
        del used["approach"]
    else:
        ignored(TRAIN, _UNUSED)
        del used["train"]
    return {**content, "quantization": used}


def train_settings(
    data: Mapping[str, Any] | None, dialect: Dialect
) -> tuple[TrainSettings | None, int | None]:
    """Return the settings of a validated section, None without a section, and the epochs.

    Raises:
        ConfigurationError: two keys contradict each other.
    """
    if data is None:
        return None, None
    section = dict(data)
    with error_path(*TRAIN):
        for theirs, ours in _NAMES.items():
            if theirs in section and ours in section:
                raise ConfigurationError(f"{theirs} means {ours}; remove one of the two")
            if theirs in section:
                section[ours] = section.pop(theirs)
        epochs = _read_epochs(section, dialect)
    options = {key: section[key] for key in ("dataloader", "loss", "max_batches") if key in section}
    return TrainSettings(**options, optimizer=_read_optimizer(section, dialect)), epochs


def _read_epochs(given: Mapping[str, Any], dialect: Dialect) -> int | None:
    if "epochs" in given:
        return int(given["epochs"])
    if "end_epoch" in given:
        start, end = given.get("start_epoch", 0), given["end_epoch"]
        if end <= start:
            with error_path("end_epoch"):
                raise ConfigurationError(f"must be greater than start_epoch ({start}), got {end}")
        return int(end - start)
    return int(given.get("epoch", _THEIR_EPOCHS)) if dialect is Dialect.INC else given.get("epoch")


def _read_optimizer(given: Mapping[str, Any], dialect: Dialect) -> dict[str, Any] | None:
    if "optimizer" not in given:
        return None
    default = {"learning_rate": _THEIR_RATE} if dialect is Dialect.INC else {}
    return {name: {**default, **options} for name, options in given["optimizer"].items()}
