"""Names of `neural_compressor.common` and its modules."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc.import_aliases import absent_names
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.utils import (
    CpuInfo,
    LazyImport,
    dump_elapsed_time,
    options,
    set_random_seed,
    set_workspace,
)
from neural_mp.compat.inc.v3.base_config import BaseConfig, ComposableConfig

__all__ = [
    "BaseConfig",
    "ComposableConfig",
    "CpuInfo",
    "LazyImport",
    "dump_elapsed_time",
    "logger",
    "options",
    "set_random_seed",
    "set_workspace",
]

debug, info, warning, error, log = (
    *(logger.debug, logger.info, logger.warning, logger.error, logger.log),
)
__version__ = "3.9"


class Logger:
    """The log of scripts."""

    def get_logger(self) -> Any:
        """Return the logger."""
        return logger


def level() -> int:
    """Return the level of the logger."""
    return logger.level


def set_resume_from(resume_from: str) -> None:
    """Keep the option; runs are resumed by `MixedPrecision.resume`."""
    options.resume_from = resume_from


def set_tensorboard(tensorboard: bool) -> None:
    """Keep the option, which has no effect."""
    options.tensorboard = tensorboard


__getattr__ = absent_names(globals())
