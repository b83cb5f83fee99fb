"""Names of `neural_compressor.common` and its modules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

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
from neural_mp.compat.inc.v3.base_config import EVERY_OP, BaseConfig, ComposableConfig
from neural_mp.compat.inc.v3.config_registry import (
    ConfigRegistry,
    ParamLevel,
    TuningParam,
    config_registry,
    get_all_config_set_from_config_registry,
    register_config,
    register_supported_configs_for_fwk,
)
from neural_mp.compat.inc.v3.devices import (
    ProcessorType,
    cpu_info,
    detect_processor_type_based_on_hw,
)

__all__ = [
    "DEFAULT_WHITE_LIST",
    "OP_NAME_OR_MODULE_TYPE",
    "BaseConfig",
    "ComposableConfig",
    "ConfigRegistry",
    "CpuInfo",
    "LazyImport",
    "ParamLevel",
    "ProcessorType",
    "TuningParam",
    "config_registry",
    "cpu_info",
    "detect_processor_type_based_on_hw",
    "dump_elapsed_time",
    "get_all_config_set_from_config_registry",
    "logger",
    "options",
    "register_config",
    "register_supported_configs_for_fwk",
    "set_random_seed",
    "set_workspace",
]

debug, info, warning, error, log = (
    logger.debug,
    logger.info,
    logger.warning,
    logger.error,
    logger.log,
)
__version__ = "3.9"


DEFAULT_WHITE_LIST = EVERY_OP
#: Type of the keys of local settings.
OP_NAME_OR_MODULE_TYPE = str | Callable[..., Any]


class Logger:
    """The log of scripts."""

    debug = staticmethod(logger.debug)
    info = staticmethod(logger.info)
    warning = staticmethod(logger.warning)
    error = staticmethod(logger.error)
    log = staticmethod(logger.log)
    _seen: ClassVar[set[str]] = set()

    def get_logger(self) -> Any:
        """Return the logger."""
        return logger

    @classmethod
    def warning_once(cls, msg: object) -> None:
        """Log a warning the first time that it is given, after a note that others are left out."""
        if str(msg) not in cls._seen:
            cls._seen.add(str(msg))
            cls.warning("a warning is logged once; later equal ones are left out:")
            cls.warning(msg)


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
