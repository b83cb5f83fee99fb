"""Configurations of algorithms: what each op is converted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.v3.base_config import BaseConfig
from neural_mp.core.enums import Approach, Scheme
from neural_mp.core.precision import INTEGERS, Precision, parse_precisions
from neural_mp.core.quant_spec import RANGE_ALGORITHMS, ROUNDINGS
from neural_mp.errors import ConfigurationError
from neural_mp.space import OpConstraint, QuantConstraint
from neural_mp.util.validators import is_integer

FP32_ONLY = OpConstraint((Precision.FP32,))
#: Classes of dense layers.
DENSE = frozenset({"Linear", "Conv1D", "Dense"})
#: Pattern of the output layers of decoders.
OUTPUT_LAYERS = r"(.*\.)?(lm_head|output_layer|embed_out)$"
_FLOATS = ("fp32", "float", "bf16", "fp16")


class AlgorithmConfig(BaseConfig):
    """Options of one algorithm, and the constraint that they mean."""

    #: Op types and classes of layers that the options hold for; empty for all.
    types: ClassVar[frozenset[str]] = frozenset()
    #: Whether single layers can be converted without the graph around them.
    in_layers: ClassVar[bool] = False
    #: Whether INT8 ops get corrections.
    corrects: ClassVar[bool] = False
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
    def get_config_set_for_tuning(cls) -> AlgorithmConfig:
        """Return the configurations to try if a script names none."""
        return cls()

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
        "absorb_layer_dict": "the factors of inputs stay in the layer",
    }

    @property
    def bit_width(self) -> int:
        """Bits of the weight; `dtype` "int4" sets them, too."""
        dtype = str(self.options.get("dtype") or "int")
        suffix = dtype.removeprefix("int")
        return (
            int(suffix)
            if dtype.startswith("int") and suffix.isdecimal()
            else self._value("bits", 4)
        )

    def _value(self, name: str, otherwise: Any) -> Any:
        value = self.options.get(name)
        return otherwise if value is None else value

    def constraint(self) -> OpConstraint:
        """Return the constraint of a dense layer."""
        dtype = str(self.options.get("dtype") or "int")
        if dtype in _FLOATS:
            return FP32_ONLY
        if not dtype.startswith("int"):
            raise NotHereError(
                f"{type(self).__name__}(dtype={dtype!r}) is not supported: no kernel here reads "
                f"weights of this type; set dtype='int', for the distribution of weights that "
                f"{dtype} suits with HQQConfig or GPTQConfig"
            )
        if self.bit_width not in INTEGERS:
            raise ConfigurationError(
                f"bits of a weight must be one of {', '.join(map(str, INTEGERS))}, got "
                f"{self.bit_width!r}"
            )
        symmetric = self._value("use_sym", True)
        return OpConstraint(
            (INTEGERS[self.bit_width],),
            QuantConstraint(
                scheme=(Scheme.SYMMETRIC if symmetric else Scheme.ASYMMETRIC,),
                group_size=self._group_sizes(),
                rounding=(next(word for word in self.roundings if word in ROUNDINGS),),
            ),
            approaches=(Approach.WEIGHT_ONLY,),
            # INT8 has one scale per channel; below 4 bits, all weights are asymmetric.
            is_lenient=True,
        )

    def _group_sizes(self) -> tuple[int, ...] | None:
        size = self._value("group_size", 32)
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
        known = chosen in set(RANGE_ALGORITHMS) and self.approach is Approach.STATIC
        return OpConstraint(
            (Precision.INT8,),
            activation=QuantConstraint(algorithm=(chosen,) if known else None),
            approaches=(self.approach,),
            is_lenient=True,
        )


class PrecisionConfig(AlgorithmConfig):
    """Options of conversion to 16 bits."""

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op."""
        return OpConstraint(tuple(parse_precisions(self.options["dtype"])))
