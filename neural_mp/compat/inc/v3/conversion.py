"""Rules of conversion that a configuration of INC 3.x means."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.api.replay import Conversion
from neural_mp.compat.inc.v3.algorithm_config import AlgorithmConfig
from neural_mp.compat.inc.v3.base_config import (
    EVERY_OP,
    BaseConfig,
    ComposableConfig,
    get_type_name,
)
from neural_mp.compat.inc.v3.torch_configs import CONFIGS
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError
from neural_mp.space import ConversionRules, OpConstraint


def parse_config_dict(given: object, known: Mapping[str, type[BaseConfig]] = CONFIGS) -> BaseConfig:
    """Return a configuration; a dict holds one for each algorithm, by the names in `known`.

    Raises:
        ConfigurationError: the value is neither.
    """
    if isinstance(given, Mapping):
        return ComposableConfig.from_dict(given, known)
    if isinstance(given, BaseConfig):
        return given
    raise ConfigurationError(
        f"quant_config must be a configuration or a dict, got {type(given).__name__}; give e.g. "
        f"RTNConfig()"
    )


def list_algorithm_configs(config: BaseConfig) -> tuple[AlgorithmConfig, ...]:
    """Return the configurations of algorithms that a configuration consists of."""
    algorithms = tuple(member for member in config.members() if isinstance(member, AlgorithmConfig))
    if not algorithms:
        raise ConfigurationError(
            f"quant_config must be of an algorithm, got {type(config).__name__}"
        )
    return algorithms


def build_conversion_rules(config: BaseConfig, model: object) -> Conversion:
    """Return rules and capture for a configuration and a model.

    Decoders of `transformers` keep their class, with `generate`; so does a module whose graph
    cannot be captured, if only weights are quantized.
    """
    algorithms = list_algorithm_configs(config)
    for used in _list_used_configs(algorithms):
        used.warn_without_effect()
    is_decoder = hasattr(model, "generate")
    in_layers = all(algorithm.in_layers for algorithm in algorithms)
    return Conversion(
        merge_algorithm_rules(algorithms),
        capture=Capture.LAYERS if is_decoder else Capture.WHOLE,
        otherwise=Capture.LAYERS if in_layers else Capture.MODULES,
        corrects=any(algorithm.corrects for algorithm in algorithms),
    )


def _list_used_configs(algorithms: tuple[AlgorithmConfig, ...]) -> list[AlgorithmConfig]:
    configs: list[AlgorithmConfig] = []
    for algorithm in algorithms:
        usual = [algorithm] if algorithm.white_list == EVERY_OP else []
        local = [
            single for c in algorithm.local_config.values() for single in list_algorithm_configs(c)
        ]
        configs += [config for config in (*usual, *local) if config not in configs]
    return configs


def merge_algorithm_rules(algorithms: tuple[AlgorithmConfig, ...]) -> ConversionRules:
    """Return the rules of several algorithms: of two for one op, the later one counts."""
    defaults: list[tuple[frozenset[str], OpConstraint]] = []
    excluded: list[str] = []
    by_type: dict[str, OpConstraint] = {}
    by_name: dict[str, OpConstraint] = {}
    for algorithm in algorithms:
        if algorithm.white_list == EVERY_OP:
            defaults.append((algorithm.types, algorithm.constraint()))
            excluded += algorithm.kept()
        for key, local in algorithm.local_config.items():
            (single,) = list_algorithm_configs(local)
            if isinstance(key, str):
                by_name[key] = single.constraint()
            else:
                by_type[get_type_name(key)] = single.constraint()
    return ConversionRules(tuple(defaults), tuple(excluded), by_type, by_name)
