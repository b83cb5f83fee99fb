"""Names of `neural_compressor.common` and its modules."""

# What is imported and not used is for scripts.
# ruff: noqa: F401

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, ClassVar, TypeVar, get_args

from neural_mp.compat.inc.import_aliases import make_absent_getter
from neural_mp.compat.inc.utils import (
    CpuInfo,
    LazyImport,
    debug,
    dump_elapsed_time,
    error,
    info,
    log,
    logger,
    options,
    set_random_seed,
    set_workspace,
    warning,
)
from neural_mp.compat.inc.v3.base_config import EVERY_OP, BaseConfig, ComposableConfig
from neural_mp.compat.inc.v3.devices import (
    ProcessorType,
    cpu_info,
    detect_processor_type_based_on_hw,
)
from neural_mp.compat.inc.v3.torch_configs import CONFIGS
from neural_mp.errors import ConfigurationError, did_you_mean

K = TypeVar("K", bound=type[BaseConfig])

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

    def get_logger(self) -> logging.Logger:
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


class ParamLevel(Enum):
    """Part of a model that an option holds for."""

    OP_LEVEL = auto()
    OP_TYPE_LEVEL = auto()
    MODEL_LEVEL = auto()


class TuningParam:
    """An option in the `params_list` of a configuration class.

    Args:
        name: of the option.
        default_val: ignored: the class sets its options.
        tunable_type: type of several values to try, e.g. `list[int]`; None for any list.
        options: ignored.
        level: ignored: options hold for ops.
    """

    def __init__(
        self,
        name: str,
        default_val: object = None,
        tunable_type: object = None,
        options: object = None,
        level: ParamLevel = ParamLevel.OP_LEVEL,
    ) -> None:
        self.name = name
        self.default_val = default_val
        self.tunable_type = tunable_type
        self.options = options
        self.level = level

    @property
    def holds_lists(self) -> bool:
        """Whether one value of the option is a list itself."""
        inner = get_args(self.tunable_type)
        return bool(inner) and bool(get_args(inner[0]))

    def is_tunable(self, value: object) -> bool:
        """Whether a value is a list of values to try: of the type, or read as such."""
        return _fits_type(value, self.tunable_type)

    def __str__(self) -> str:
        return self.name


def _fits_type(value: Any, kind: Any) -> bool:
    """Whether a value is of a type; text of a number is of the type of the number."""
    inner = get_args(kind)
    if inner:
        return isinstance(value, list | tuple) and all(_fits_type(item, inner[0]) for item in value)
    if kind in (int, float):
        try:
            return bool(kind(value) == float(value))
        except (TypeError, ValueError):
            return False
    return kind in (None, Any) or isinstance(value, kind)


class ConfigRegistry:
    """Framework → name of an algorithm → configuration class and priority."""

    def __init__(self) -> None:
        self._kinds: dict[str, dict[str, tuple[float, type[BaseConfig]]]] = defaultdict(dict)
        for name, kind in CONFIGS.items():
            self.register_config_impl("torch", name)(kind)

    def register_config_impl(
        self, framework_name: str, algo_name: str, priority: float = 0
    ) -> Callable[[K], K]:
        """Return a decorator that registers a configuration class."""

        def register_kind(kind: K) -> K:
            self._kinds[framework_name][algo_name] = priority, kind
            return kind

        return register_kind

    def get_all_configs(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return framework → algorithm → its priority and its class."""
        return {
            framework: {
                name: {"priority": priority, "cls": kind}
                for name, (priority, kind) in configs.items()
            }
            for framework, configs in self._kinds.items()
        }

    def get_cls_configs(self) -> dict[str, dict[str, type[BaseConfig]]]:
        """Return framework → algorithm → its class."""
        return {
            framework: {name: kind for name, (_, kind) in configs.items()}
            for framework, configs in self._kinds.items()
        }

    def get_all_config_cls_by_fwk_name(self, fwk_name: str) -> list[type[BaseConfig]]:
        """Return the classes of a framework.

        Raises:
            ConfigurationError: the framework has none.
        """
        if fwk_name not in self._kinds:
            raise ConfigurationError(
                f"no configuration is registered for the framework {fwk_name!r}"
                f"{did_you_mean(fwk_name, self._kinds)}"
            )
        return [kind for _, kind in self._kinds[fwk_name].values()]


config_registry = ConfigRegistry()
register_config = config_registry.register_config_impl


def get_all_config_set_from_config_registry(fwk_name: str) -> list[BaseConfig]:
    """Return the configurations to try of every algorithm of a framework."""
    kinds: list[Any] = config_registry.get_all_config_cls_by_fwk_name(fwk_name)
    return [kind.get_config_set_for_tuning() for kind in kinds]


def register_supported_configs_for_fwk(fwk_name: str) -> None:
    """Call `register_supported_configs` of the classes of a framework that have it."""
    for kind in config_registry.get_all_config_cls_by_fwk_name(fwk_name):
        register = getattr(kind, "register_supported_configs", None)
        if register is not None:
            register()


__getattr__ = make_absent_getter(globals())
