"""Configurations of INC 3.x: shared behavior, and what each op is converted to.

Shared behavior: local settings, sets of values, JSON.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.v3.devices import ProcessorType, is_client
from neural_mp.core.enums import Approach, Scheme
from neural_mp.core.precision import INTEGERS, Precision, parse_precisions
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, ROUND_TO_NEAREST, ROUNDINGS
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.space import OpConstraint, QuantConstraint, name_matches
from neural_mp.util.validators import is_integer

if TYPE_CHECKING:
    from torch.nn import Module

#: Keys in the dict of a configuration with settings of single ops.
GLOBAL, LOCAL = "global", "local"
#: `white_list` for all ops, and for none besides those with local settings.
EVERY_OP, NO_OP = "*", None

C = TypeVar("C", bound="BaseConfig")
FP32_ONLY = OpConstraint((Precision.FP32,))
#: Classes of dense layers.
DENSE = frozenset({"Linear", "Conv1D", "Dense"})
#: Pattern of the output layers of decoders.
OUTPUT_LAYERS = r"(.*\.)?(lm_head|output_layer|embed_out)$"
_FLOATS = ("fp32", "float", "bf16", "fp16")
#: Small floating-point type → bits of the asymmetric integers in groups that take its place.
_SMALL_FLOATS: Mapping[str, int] = {
    **dict.fromkeys(("nf4", "fp4", "fp4_e2m1", "fp4_e2m1_bnb"), 4),
    **dict.fromkeys(("fp8_e4m3", "fp8_e4m3fn", "fp8_e4m3fnuz", "fp8_e5m2", "fp8_e5m2fnuz"), 8),
}
A = TypeVar("A", bound="AlgorithmConfig")


class BaseConfig:
    """Options of one algorithm, and other configurations for single ops or types of ops.

    Options that are not known are kept, without effect, and a warning is logged.

    Args:
        *values: values of the options, in their order.
        white_list: ops that the options hold for: `"*"` for all, names or types, or None.
        **options: values of options by name. A list stands for several configurations: see
            `expand`.

    Raises:
        ConfigurationError: there are more values than options.
    """

    name: ClassVar[str] = "base_config"
    #: Option → default, in the order of positional arguments.
    defaults: ClassVar[Mapping[str, Any]] = {}
    #: Options whose values are lists themselves.
    lists: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls, **options: object) -> None:
        """Read the options of a class that lists their names in `params_list`."""
        super().__init_subclass__(**options)
        listed = cls.__dict__.get("params_list")
        if isinstance(listed, list):
            cls.defaults = dict.fromkeys(map(str, listed))
            cls.lists = frozenset(str(p) for p in listed if getattr(p, "holds_lists", False))

    def __init__(
        self, *values: object, white_list: str | Sequence[Any] | None = EVERY_OP, **options: object
    ) -> None:
        if len(values) > len(self.defaults):
            raise ConfigurationError(
                f"{type(self).__name__} takes {len(self.defaults)} options, got {len(values)}"
            )
        arguments = {**dict(zip(self.defaults, values, strict=False)), **options}
        for name in arguments.keys() - self.defaults.keys():
            logger.warning(
                "%s has no option %r, which has no effect%s",
                type(self).__name__,
                name,
                did_you_mean(name, self.defaults),
            )
        self.options: dict[str, Any] = {**self.defaults, **arguments}
        self.white_list = white_list
        self.local_config: dict[Any, BaseConfig] = {}
        if isinstance(white_list, list | tuple):
            self.set_local(list(white_list), type(self)(**self.options, white_list=NO_OP))

    def __getattr__(self, name: str) -> Any:
        options = self.__dict__.get("options", {})
        if name in options:
            return options[name]
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}{did_you_mean(name, options)}"
        )

    def __setattr__(self, name: str, value: object) -> None:
        options = self.__dict__.get("options", {})
        if name not in options:
            super().__setattr__(name, value)
            return
        options[name] = value
        if isinstance(self.white_list, list | tuple):
            for key in self.white_list:
                self.local_config[key].options[name] = value

    def _post_init(self) -> None:
        """Do nothing: the white list holds from the start. Classes of scripts call this."""

    @property
    def global_config(self) -> BaseConfig | None:
        """The options for all ops without settings of their own; None if there are none."""
        if self.white_list != EVERY_OP:
            return None
        return type(self)(**self.options, white_list=NO_OP)

    @property
    def params_list(self) -> list[str]:
        """The names of the options."""
        return [*self.defaults, "white_list"]

    def set_local(self: C, operator_name_or_list: object, config: BaseConfig) -> C:
        """Set the configuration of ops: a name, a pattern, a type, or a list of them."""
        keys = operator_name_or_list
        for key in keys if isinstance(keys, list | tuple) else [keys]:
            if key in self.local_config:
                logger.warning("the configuration of %s is replaced", key)
            self.local_config[key] = config
        return self

    def to_config_mapping(
        self,
        config_list: Iterable[BaseConfig] | None = None,
        model_info: Iterable[tuple[str, str]] = (),
    ) -> dict[tuple[str, str], BaseConfig]:
        """Return (name, type) of an op → the configuration that it is converted by.

        Names come before types, and types before the options for all ops; of several names or
        types, the last one counts.

        Args:
            config_list: the configurations; default: this one, or its members.
            model_info: pairs of name and type of the ops, as of `get_model_info`.
        """
        mapping: dict[tuple[str, str], BaseConfig] = {}
        for name, kind in model_info:
            for config in self.members() if config_list is None else config_list:
                chosen = config.of_op(name, kind)
                if chosen is not None:
                    mapping[name, kind] = chosen
        return mapping

    def of_op(self, name: str, kind: str) -> BaseConfig | None:
        """Return the configuration of an op; None if it has none."""
        keys = [*self.local_config]
        by_name = [key for key in keys if isinstance(key, str) and name_matches(key, (name,))]
        local = by_name or [key for key in keys if get_type_name(key) == kind]
        return self.local_config[local[-1]] if local else self.global_config

    def get_params_dict(self) -> dict[str, Any]:
        """Return option → value."""
        return dict(self.options)

    def to_dict(self) -> dict[str, Any]:
        """Return the options; with local settings, under the keys `global` and `local`."""
        if not self.local_config:
            return self.get_params_dict()
        result: dict[str, Any] = {LOCAL: {k: c.to_dict() for k, c in self.local_config.items()}}
        if self.white_list == EVERY_OP:
            result[GLOBAL] = self.get_params_dict()
        return result

    @classmethod
    def from_dict(cls: type[C], config_dict: Mapping[str, Any]) -> C:
        """Reverse `to_dict`."""
        if GLOBAL not in config_dict and LOCAL not in config_dict:
            return cls(**config_dict)
        white_list = EVERY_OP if GLOBAL in config_dict else NO_OP
        config = cls(**{"white_list": white_list, **config_dict.get(GLOBAL, {})})
        for key, options in config_dict.get(LOCAL, {}).items():
            config.set_local(key, cls(**options))
        return config

    def to_json_string(self, use_diff: bool = False) -> str:
        """Return the dict as JSON; with `use_diff`, without the options at their defaults."""
        if use_diff:
            items, defaults = self.options.items(), self.defaults
            content = {k: v for k, v in items if k not in defaults or v != defaults[k]}
        else:
            content = self.to_dict()
        return json.dumps(_name_type_keys(content), indent=2, default=str) + "\n"

    def to_json_file(self, filename: str | Path) -> None:
        """Write `to_json_string` to a file."""
        Path(filename).write_text(self.to_json_string(), encoding="utf-8")

    @classmethod
    def from_json_string(cls: type[C], text: str) -> C:
        """Reverse `to_json_string`.

        Raises:
            ConfigurationError: the text is not the JSON of a dict.
        """
        try:
            content = json.loads(text)
        except ValueError as error:
            raise ConfigurationError(
                f"the configuration must be JSON, got {text[:40]!r}: {error}"
            ) from error
        if not isinstance(content, dict):
            raise ConfigurationError(f"the configuration must be a dict, got {text[:40]!r}")
        return cls.from_dict(content)

    @classmethod
    def from_json_file(cls: type[C], filename: str | Path) -> C:
        """Read a file written by `to_json_file`."""
        return cls.from_json_string(Path(filename).read_text(encoding="utf-8"))

    def expand(self: C) -> list[C]:
        """Return one configuration for each combination of the values of options with a list."""
        several = {}
        for name, value in self.options.items():
            is_list = isinstance(value, list) and bool(value)
            if is_list and (name not in self.lists or all(isinstance(v, list) for v in value)):
                several[name] = value
        configs = []
        for values in itertools.product(*several.values()):
            chosen = dict(zip(several, values, strict=True))
            config = type(self)(**{**self.options, **chosen, "white_list": self.white_list})
            config.local_config.update(self.local_config)
            configs.append(config)
        return configs

    def __add__(self, other: BaseConfig) -> BaseConfig:
        if isinstance(other, type(self)):
            self.local_config.update(other.local_config)
            return self
        return ComposableConfig([self, other])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"

    def members(self) -> tuple[BaseConfig, ...]:
        """Return the configurations that this one consists of: itself."""
        return (self,)


class ComposableConfig(BaseConfig):
    """Several configurations of different algorithms: of two for one op, the later one counts.

    Args:
        configs: the configurations.
    """

    name: ClassVar[str] = "composable_config"

    def __init__(self, configs: Iterable[BaseConfig]) -> None:
        super().__init__()
        self.config_list = list(configs)

    def __add__(self, other: BaseConfig) -> BaseConfig:
        self.config_list += other.members()
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return name of the algorithm → the dict of its configuration."""
        return {config.name: config.to_dict() for config in self.config_list}

    def get_model_info(self, model: Module) -> list[tuple[str, str]]:
        """Return name and type of the layers that the members' options may hold for."""
        layers = (pair for config in self.config_list for pair in config.get_model_info(model))
        return list(dict.fromkeys(layers))

    @classmethod
    def from_dict(  # type: ignore[override]
        cls, config_dict: Mapping[str, Any], config_registry: Mapping[str, type[BaseConfig]]
    ) -> BaseConfig:
        """Read a dict of algorithms; the only configuration if there is one.

        Raises:
            ConfigurationError: an algorithm is unknown.
        """
        configs = []
        for name, options in config_dict.items():
            if name not in config_registry:
                raise ConfigurationError(
                    f"the configuration names the algorithm {name!r}, which does not exist"
                    f"{did_you_mean(name, config_registry)}"
                )
            configs.append(config_registry[name].from_dict(options))
        return configs[0] if len(configs) == 1 else cls(configs)

    def expand(self) -> list[ComposableConfig]:
        """Return one configuration for each combination of its members' configurations."""
        combinations = itertools.product(*(config.expand() for config in self.config_list))
        return [ComposableConfig(configs) for configs in combinations]

    def members(self) -> tuple[BaseConfig, ...]:
        """Return the configurations that this one consists of."""
        return tuple(self.config_list)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ComposableConfig) and self.config_list == other.config_list

    __hash__ = None


def expanded(configs: BaseConfig | Iterable[BaseConfig]) -> Iterator[BaseConfig]:
    """Yield the configurations that one or several stand for, in their order."""
    several = (
        [configs] if isinstance(configs, BaseConfig) else cast("Iterable[BaseConfig]", configs)
    )
    for config in several:
        yield from config.expand()


def get_type_name(key: object) -> str:
    """Return the name of a type of ops, which may be a class."""
    return key if isinstance(key, str) else getattr(key, "__name__", str(key))


def _name_type_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {get_type_name(key): _name_type_keys(item) for key, item in value.items()}
    return value


class AlgorithmConfig(BaseConfig):
    """Options of one algorithm, and the constraint that they mean."""

    #: Op types and classes of layers that the options hold for; empty for all.
    types: ClassVar[frozenset[str]] = frozenset()
    #: Whether single layers can be converted without the graph around them.
    in_layers: ClassVar[bool] = False
    #: Whether INT8 ops get corrections.
    corrects: ClassVar[bool] = False
    #: Option → values to try if a script names no configurations.
    tried: ClassVar[Mapping[str, Any]] = {}
    #: Option → reason why other values than the default have no effect.
    idle: ClassVar[Mapping[str, str]] = {}

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op that the options hold for.

        Raises:
            ConfigurationError: the value of an option is invalid.
            NotHereError: the value of an option is not supported.
        """
        raise NotImplementedError

    @classmethod
    def get_config_set_for_tuning(cls: type[A]) -> A:
        """Return the configurations to try if a script names none."""
        return cls(**copy.deepcopy(dict(cls.tried)))

    @classmethod
    def get_predefined_configs(cls) -> dict[ProcessorType, AlgorithmConfig]:
        """Return kind of processor → its default configuration."""
        if "use_layer_wise" not in cls.defaults:
            return {kind: cls() for kind in ProcessorType}
        return {kind: cls(use_layer_wise=is_client(kind)) for kind in ProcessorType}

    @classmethod
    def get_model_info(cls, model: Module) -> list[tuple[str, str]]:
        """Return name and type of the layers of a module that the options may hold for."""
        leaves = (pair for pair in model.named_modules() if not any(pair[1].children()))
        layers = [(name, type(layer).__name__) for name, layer in leaves]
        return [pair for pair in layers if not cls.types or pair[1] in cls.types]

    def kept(self) -> tuple[str, ...]:
        """Return patterns of the ops that the algorithm leaves in FP32, unless they are named."""
        return ()

    def warn_without_effect(self) -> None:
        """Log a warning for each option that is set and has no effect."""
        for name, why in self.idle.items():
            if self.options.get(name) != self.defaults.get(name):
                logger.warning("%s.%s has no effect: %s", type(self).__name__, name, why)


class WeightOnlyConfig(AlgorithmConfig):
    """Options of weight-only quantization of dense layers."""

    types: ClassVar[frozenset[str]] = DENSE
    in_layers: ClassVar[bool] = True
    #: Roundings of the weight, best first; the first that exists counts.
    roundings: ClassVar[tuple[str, ...]] = ("rtn",)
    idle: ClassVar[Mapping[str, str]] = {
        "use_double_quant": "scales and offsets are stored in bfloat16",
        "group_dim": "groups are of consecutive inputs",
        "folding": "the factors of inputs stay in the layer",
        "act_order": "damping is relative to the power of each input",
        "use_full_range": "the range of a symmetric group is as long on both sides of 0",
        "use_mse_search": "use HQQConfig, whose offsets minimize the error of the weights",
        "absorb_layer_dict": "the factors of inputs stay in the layer",
    }

    @property
    def bit_width(self) -> int:
        """Bits of the smallest kernel for the weight; `dtype` "int4" or "nf4" sets them, too."""
        if self._is_small_float:
            return _SMALL_FLOATS[self._dtype]
        bits = self._asked_bits
        if not is_integer(bits) or not min(INTEGERS) <= bits <= max(INTEGERS):
            raise ConfigurationError(
                f"bits of a weight must be a whole number from {min(INTEGERS)} to "
                f"{max(INTEGERS)}, got {bits!r}"
            )
        return min(kernel for kernel in INTEGERS if kernel >= bits)

    @property
    def _asked_bits(self) -> Any:
        suffix = self._dtype.removeprefix("int")
        return int(suffix) if suffix.isdecimal() else self._get_option_value("bits", 4)

    @property
    def _dtype(self) -> str:
        return str(self.options.get("dtype") or "int")

    @property
    def _is_small_float(self) -> bool:
        return self._dtype in _SMALL_FLOATS

    @property
    def _rounding(self) -> str:
        rounding = next(name for name in self.roundings if name in ROUNDINGS)
        return "hqq" if self._is_small_float and rounding == ROUND_TO_NEAREST else rounding

    def warn_without_effect(self) -> None:
        """Log warnings for options without effect, and for weights of another type than asked."""
        super().warn_without_effect()
        if self._dtype in _FLOATS:
            return
        if self._is_small_float or self.bit_width != self._asked_bits:
            requested = self._dtype if self._is_small_float else f"{self._asked_bits} bits"
            logger.warning(
                "no kernel reads weights in %s: integers of %d bits are used, rounded by %s",
                requested,
                self.bit_width,
                self._rounding,
            )

    def _get_option_value(self, name: str, otherwise: object) -> Any:
        value = self.options.get(name)
        return otherwise if value is None else value

    def constraint(self) -> OpConstraint:
        """Return the constraint of a dense layer."""
        if self._dtype in _FLOATS:
            return FP32_ONLY
        if not self._is_small_float and not self._dtype.startswith("int"):
            raise NotHereError(
                f"{type(self).__name__}(dtype={self._dtype!r}) is not supported: no kernel here "
                f"reads weights of this type; set dtype='int'"
            )
        symmetric = self._get_option_value("use_sym", True) and not self._is_small_float
        return OpConstraint(
            (INTEGERS[self.bit_width],),
            QuantConstraint(
                scheme=(Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC,),
                group_size=self._group_sizes(),
                rounding=(self._rounding,),
            ),
            approaches=(Approach.WEIGHT_ONLY,),
            # INT8 has one scale per channel; below 4 bits, all weights are asymmetric.
            is_lenient=True,
        )

    def _group_sizes(self) -> tuple[int, ...] | None:
        size = self._get_option_value("group_size", 32)
        if not is_integer(size) or (size < 1 and size != -1):
            raise ConfigurationError(
                f"group_size of a weight must be a whole number from 1, or -1, got {size!r}"
            )
        return None if size == -1 else (int(size),)

    def kept(self) -> tuple[str, ...]:
        """Return the output layers of decoders, unless `quant_lm_head` is set."""
        return () if self.options.get("quant_lm_head") else (OUTPUT_LAYERS,)


class Int8Config(AlgorithmConfig):
    """Options of INT8 with calibrated or dynamic ranges."""

    approach: ClassVar[Approach] = Approach.STATIC
    #: Option of the algorithm that chooses the range of inputs.
    algorithm_option: ClassVar[str] = "act_algo"

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op."""
        chosen = str(self.options.get(self.algorithm_option) or "minmax")
        supported = chosen in set(RANGE_ALGORITHMS) and self.approach is Approach.STATIC
        return OpConstraint(
            (Precision.INT8,),
            activation=QuantConstraint(algorithm=(chosen,) if supported else None),
            approaches=(self.approach,),
            is_lenient=True,
        )


class PrecisionConfig(AlgorithmConfig):
    """Options of conversion to 16 bits."""

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op."""
        return OpConstraint(tuple(parse_precisions(self.options["dtype"])))
