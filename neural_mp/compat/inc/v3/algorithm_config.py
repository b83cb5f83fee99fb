"""Configurations of algorithms: what each op is converted to."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.v3.base_config import BaseConfig
from neural_mp.compat.inc.v3.devices import ProcessorType, is_client
from neural_mp.core.enums import Approach, Scheme
from neural_mp.core.precision import INTEGERS, Precision, parse_precisions
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, ROUND_TO_NEAREST, ROUNDINGS
from neural_mp.errors import ConfigurationError
from neural_mp.space import OpConstraint, QuantConstraint
from neural_mp.util.validators import is_integer

if TYPE_CHECKING:
    from torch.nn import Module

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
