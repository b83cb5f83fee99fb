"""The configuration classes of `neural_compressor.tensorflow`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.v3.algorithm_config import FP32_ONLY, Int8Config
from neural_mp.core.precision import Precision
from neural_mp.space import OpConstraint


class StaticQuantConfig(Int8Config):
    """INT8 with calibrated ranges; `weight_dtype` and `act_dtype` may be floats."""

    name: ClassVar[str] = "static_quant"
    algorithm_option: ClassVar[str] = "act_algorithm"
    defaults: ClassVar[Mapping[str, Any]] = {
        "weight_dtype": "int8",
        "weight_sym": True,
        "weight_granularity": "per_tensor",
        "weight_algorithm": "minmax",
        "act_dtype": "int8",
        "act_sym": True,
        "act_granularity": "per_tensor",
        "act_algorithm": "minmax",
    }

    def constraint(self) -> OpConstraint:
        """Return the constraint of an op."""
        dtypes = {str(self.options["weight_dtype"]), str(self.options["act_dtype"])}
        if "fp32" in dtypes:
            return FP32_ONLY
        if "bf16" in dtypes:
            return OpConstraint((Precision.BF16,))
        return super().constraint()

    @classmethod
    def get_config_set_for_tuning(cls) -> StaticQuantConfig:
        """Return the configurations to try if a script names none."""
        return cls(act_algorithm=["kl", "minmax"])


class SmoothQuantConfig(Int8Config):
    """INT8 with calibrated ranges, and channels scaled where that reduces noise."""

    name: ClassVar[str] = "smooth_quant"
    corrects: ClassVar[bool] = True
    lists: ClassVar[frozenset[str]] = frozenset({"op_types"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "alpha": 0.5,
        "folding": False,
        "percentile": 99.999,
        "op_types": ["MatMul", "Conv2D"],
        "scales_per_op": True,
        "record_max_info": False,
        "weight_clip": True,
        "auto_alpha_args": {},
    }
    idle: ClassVar[Mapping[str, str]] = {
        "alpha": "channels are scaled with 0.5, or equalized by weights, whichever is better",
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> SmoothQuantConfig:
        """Return the configurations to try if a script names none."""
        return cls(alpha=np.arange(0.1, 1.0, 0.1).tolist())


#: Name of an algorithm → its configuration.
TENSORFLOW_CONFIGS = {kind.name: kind for kind in (StaticQuantConfig, SmoothQuantConfig)}


def get_default_static_quant_config() -> StaticQuantConfig:
    """Return the default configuration."""
    return StaticQuantConfig()


def get_default_sq_config() -> SmoothQuantConfig:
    """Return the default configuration."""
    return SmoothQuantConfig()
