"""Configuration classes that scripts define: their tunable options, and a registry of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from typing import Any, TypeVar, get_args

from neural_mp.compat.inc.v3.base_config import BaseConfig
from neural_mp.compat.inc.v3.conversion import ALGORITHMS
from neural_mp.errors import ConfigurationError, did_you_mean

K = TypeVar("K", bound=type[BaseConfig])


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
        default_val: Any = None,
        tunable_type: Any = None,
        options: Any = None,
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

    def is_tunable(self, value: Any) -> bool:
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
        self._found: dict[str, dict[str, tuple[float, type[BaseConfig]]]] = defaultdict(dict)
        for name, kind in ALGORITHMS.items():
            self.register_config_impl("torch", name)(kind)

    def register_config_impl(
        self, framework_name: str, algo_name: str, priority: float = 0
    ) -> Callable[[K], K]:
        """Return a decorator that registers a configuration class."""

        def register_kind(kind: K) -> K:
            self._found[framework_name][algo_name] = priority, kind
            return kind

        return register_kind

    def get_all_configs(self) -> dict[str, dict[str, dict[str, Any]]]:
        """Return framework → algorithm → its priority and its class."""
        return {
            framework: {
                name: {"priority": priority, "cls": kind}
                for name, (priority, kind) in configs.items()
            }
            for framework, configs in self._found.items()
        }

    def get_cls_configs(self) -> dict[str, dict[str, type[BaseConfig]]]:
        """Return framework → algorithm → its class."""
        return {
            framework: {name: kind for name, (_, kind) in configs.items()}
            for framework, configs in self._found.items()
        }

    def get_all_config_cls_by_fwk_name(self, fwk_name: str) -> list[type[BaseConfig]]:
        """Return the classes of a framework.

        Raises:
            ConfigurationError: the framework has none.
        """
        if fwk_name not in self._found:
            raise ConfigurationError(
                f"no configuration is registered for the framework {fwk_name!r}"
                f"{did_you_mean(fwk_name, self._found)}"
            )
        return [kind for _, kind in self._found[fwk_name].values()]


config_registry = ConfigRegistry()
register_config = config_registry.register_config_impl


def get_all_config_set_from_config_registry(fwk_name: str) -> list[BaseConfig]:
    """Return the configurations to try of every algorithm of a framework."""
    kinds: list[Any] = [*config_registry.get_all_config_cls_by_fwk_name(fwk_name)]
    return [kind.get_config_set_for_tuning() for kind in kinds]


def register_supported_configs_for_fwk(fwk_name: str) -> None:
    """Call `register_supported_configs` of the classes of a framework that have it."""
    for kind in config_registry.get_all_config_cls_by_fwk_name(fwk_name):
        register = getattr(kind, "register_supported_configs", None)
        if register is not None:
            register()
