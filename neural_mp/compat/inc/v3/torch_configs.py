"""`neural_compressor.torch.quantization`: the configuration classes for PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.import_aliases import NotHereError, absent_names
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.v3.algorithm_config import (
    DENSE,
    AlgorithmConfig,
    Int8Config,
    PrecisionConfig,
    WeightOnlyConfig,
)
from neural_mp.compat.inc.v3.devices import is_client
from neural_mp.core.enums import Approach
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.space import OpConstraint

_WEIGHT = {"dtype": "int", "bits": 4, "use_sym": True, "group_size": 32}
_DOUBLE = {
    "use_double_quant": False,
    "double_quant_dtype": "int",
    "double_quant_bits": 8,
    "double_quant_use_sym": False,
    "double_quant_group_size": 256,
    "quant_lm_head": False,
}
_RANGES = {"group_dim": 1, "use_full_range": False, "use_mse_search": False}
_INT8 = {
    "w_dtype": "int8",
    "w_sym": True,
    "w_granularity": "per_channel",
    "w_algo": "minmax",
    "act_dtype": "uint8",
    "act_sym": False,
    "act_granularity": "per_tensor",
    "act_algo": "minmax",
}


class RTNConfig(WeightOnlyConfig):
    """Weights rounded to nearest."""

    name: ClassVar[str] = "rtn"
    defaults: ClassVar[Mapping[str, Any]] = {
        **_WEIGHT,
        **_RANGES,
        "use_layer_wise": True,
        "model_path": "",
        **_DOUBLE,
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> RTNConfig:
        """Return the configurations to try if a script names none."""
        return cls(use_sym=[True, False], group_size=[32, 128])


class GPTQConfig(WeightOnlyConfig):
    """Weights whose rounding errors are compensated with calibration data."""

    name: ClassVar[str] = "gptq"
    roundings: ClassVar[tuple[str, ...]] = ("gptq",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **_WEIGHT,
        "use_mse_search": False,
        "use_layer_wise": False,
        "use_block_wise": False,
        "model_path": "",
        **_DOUBLE,
        "act_order": False,
        "hybrid_order": False,
        "fp8_aware": False,
        "percdamp": 0.01,
        "block_size": 2048,
        "static_groups": False,
        "true_sequential": False,
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> GPTQConfig:
        """Return the configurations to try if a script names none."""
        return cls(use_sym=[False, True])


class AWQConfig(WeightOnlyConfig):
    """Weights scaled by the magnitudes of their inputs before rounding."""

    name: ClassVar[str] = "awq"
    roundings: ClassVar[tuple[str, ...]] = ("awq",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **_WEIGHT,
        **_RANGES,
        "use_layer_wise": False,
        "model_path": "",
        **_DOUBLE,
        "double_quant_use_sym": True,
        "use_auto_scale": True,
        "use_auto_clip": True,
        "folding": False,
        "absorb_layer_dict": {},
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> AWQConfig:
        """Return the configurations to try if a script names none."""
        return cls(bits=[4, 8])


class TEQConfig(WeightOnlyConfig):
    """Trained scales of inputs, which are chosen as by AWQ here."""

    name: ClassVar[str] = "teq"
    roundings: ClassVar[tuple[str, ...]] = ("awq",)
    defaults: ClassVar[Mapping[str, Any]] = {
        **_WEIGHT,
        **_RANGES,
        "use_layer_wise": False,
        **_DOUBLE,
        "double_quant_use_sym": True,
        "absorb_to_layer": {},
        "folding": True,
    }

    def warn_without_effect(self) -> None:
        """Log a note on the algorithm, and warnings for options without effect."""
        logger.warning("TEQConfig: the scales of inputs are searched, as by AWQ, not trained")
        super().warn_without_effect()

    @classmethod
    def get_config_set_for_tuning(cls) -> TEQConfig:
        """Return the configurations to try if a script names none."""
        return cls(bits=[4, 8])


class HQQConfig(WeightOnlyConfig):
    """Weights with offsets that suit the many small ones better than the few large ones."""

    name: ClassVar[str] = "hqq"
    roundings: ClassVar[tuple[str, ...]] = ("hqq",)
    defaults: ClassVar[Mapping[str, Any]] = {
        "dtype": "int",
        "bits": 4,
        "group_size": 64,
        "quant_zero": True,
        "quant_scale": False,
        "scale_quant_group_size": 128,
        "quant_lm_head": False,
    }

    def constraint(self) -> OpConstraint:
        """Return the constraint of a dense layer: always asymmetric."""
        self.options.setdefault("use_sym", False)
        return super().constraint()

    @classmethod
    def get_config_set_for_tuning(cls) -> HQQConfig:
        """Return the configurations to try if a script names none."""
        return cls(bits=[4, 8])


class DynamicQuantConfig(Int8Config):
    """INT8 with ranges of inputs computed on every run."""

    name: ClassVar[str] = "pt2e_dynamic_quant"
    approach: ClassVar[Approach] = Approach.DYNAMIC
    defaults: ClassVar[Mapping[str, Any]] = {
        **_INT8,
        "w_granularity": "per_tensor",
        "act_algo": "kl",
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> DynamicQuantConfig:
        """Return the configurations to try if a script names none."""
        return cls()


class FP8Config(AlgorithmConfig):
    """Layers in float8: a configuration to read and to write, that no model here is converted by.

    Its options are kept as they are given.
    """

    name: ClassVar[str] = "fp8_quant"
    lists: ClassVar[frozenset[str]] = frozenset({"mod_dict", "blocklist", "allowlist"})
    defaults: ClassVar[Mapping[str, Any]] = {
        "dump_stats_path": "./hqt_output/measure",
        "fp8_config": "E4M3",
        "hp_dtype": "bf16",
        "blocklist": {"names": [], "types": ()},
        "allowlist": {"names": [], "types": ()},
        "mode": "AUTOMATIC",
        "scale_method": "maxabs_hw",
        "scale_params": {},
        "observer": "maxabs",
        "mod_dict": {},
        "measure_exclude": "OUTPUT",
        "fake_quant": False,
    }

    def constraint(self) -> OpConstraint:
        """Raise NotHereError.

        Raises:
            NotHereError: always.
        """
        raise NotHereError(
            "FP8Config is not supported: no CPU kernel computes in float8; use "
            "INT8StaticQuantConfig, or MixedPrecisionConfig(dtype='bf16')"
        )


class INT8StaticQuantConfig(Int8Config):
    """INT8 with calibrated ranges."""

    name: ClassVar[str] = "static_quant"
    lists: ClassVar[frozenset[str]] = frozenset({"excluded_precisions", "model_info"})
    defaults: ClassVar[Mapping[str, Any]] = {**_INT8, "excluded_precisions": []}

    def __new__(cls, *values: Any, **options: Any) -> Any:
        """Return a configuration of float8 if `fp8_config` is given."""
        if "fp8_config" in options:
            return FP8Config(*values, **options)
        return super().__new__(cls)

    @classmethod
    def get_config_set_for_tuning(cls, dtype: str = "int8") -> INT8StaticQuantConfig:
        """Return the configurations to try if a script names none."""
        return cls(act_algo=["kl", "minmax"])


StaticQuantConfig = INT8StaticQuantConfig


class SmoothQuantConfig(Int8Config):
    """INT8 with calibrated ranges, and channels scaled where that reduces noise."""

    name: ClassVar[str] = "smooth_quant"
    corrects: ClassVar[bool] = True
    lists: ClassVar[frozenset[str]] = frozenset({"excluded_precisions"})
    defaults: ClassVar[Mapping[str, Any]] = {
        **_INT8,
        "excluded_precisions": [],
        "alpha": 0.5,
        "folding": False,
        "scale_sharing": False,
        "init_alpha": 0.5,
        "alpha_min": 0.0,
        "alpha_max": 1.0,
        "alpha_step": 0.1,
        "shared_criterion": "max",
        "do_blockwise": False,
        "auto_alpha_args": None,
    }
    idle: ClassVar[Mapping[str, str]] = {
        "alpha": "channels are scaled with 0.5, or equalized by weights, whichever is better",
    }

    @classmethod
    def get_config_set_for_tuning(cls) -> SmoothQuantConfig:
        """Return the configurations to try if a script names none."""
        return cls(alpha=np.arange(0.1, 1.0, 0.1).tolist())


class MixedPrecisionConfig(PrecisionConfig):
    """Layers in 16 bits."""

    name: ClassVar[str] = "mixed_precision"
    types: ClassVar[frozenset[str]] = DENSE | {"Conv1d", "Conv2d", "Conv3d"}
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "fp16"}

    @classmethod
    def get_config_set_for_tuning(cls) -> MixedPrecisionConfig:
        """Return the configurations to try if a script names none."""
        return cls(dtype=["fp16", "bf16", "fp32"])


#: Name of an algorithm → its configuration.
CONFIGS: Mapping[str, type[AlgorithmConfig]] = {
    kind.name: kind
    for kind in (
        RTNConfig,
        GPTQConfig,
        AWQConfig,
        TEQConfig,
        HQQConfig,
        DynamicQuantConfig,
        INT8StaticQuantConfig,
        SmoothQuantConfig,
        MixedPrecisionConfig,
    )
}
#: Kind of double quantization → options that mean it.
DOUBLE_QUANT_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "BNB_NF4": {"dtype": "nf4", "use_double_quant": True},
    "GGML_TYPE_Q4_K": {
        "use_sym": False,
        "use_double_quant": True,
        "double_quant_bits": 6,
        "double_quant_use_sym": True,
        "double_quant_group_size": 8,
    },
}


def get_default_rtn_config(processor_type: object = None) -> RTNConfig:
    """Return the default configuration of a kind of processor, by default of a server."""
    return RTNConfig(use_layer_wise=is_client(processor_type))


def get_default_gptq_config(processor_type: object = None) -> GPTQConfig:
    """Return the default configuration of a kind of processor, by default of a server."""
    return GPTQConfig(use_layer_wise=is_client(processor_type))


def get_default_awq_config() -> AWQConfig:
    """Return the default configuration."""
    return AWQConfig()


def get_default_teq_config() -> TEQConfig:
    """Return the default configuration."""
    return TEQConfig()


def get_default_hqq_config() -> HQQConfig:
    """Return the default configuration."""
    return HQQConfig()


def get_default_dynamic_config() -> DynamicQuantConfig:
    """Return the default configuration."""
    return DynamicQuantConfig()


def get_default_static_config() -> INT8StaticQuantConfig:
    """Return the default configuration."""
    return INT8StaticQuantConfig()


def get_default_fp8_config() -> FP8Config:
    """Return the default configuration."""
    return FP8Config()


def get_default_sq_config() -> SmoothQuantConfig:
    """Return the default configuration."""
    return SmoothQuantConfig()


def get_default_mixed_precision_config() -> MixedPrecisionConfig:
    """Return the default configuration."""
    return MixedPrecisionConfig()


def get_default_mixed_precision_config_set() -> MixedPrecisionConfig:
    """Return the default configurations for tuning."""
    return MixedPrecisionConfig.get_config_set_for_tuning()


def get_default_double_quant_config(type: str = "BNB_NF4") -> RTNConfig:
    """Return a configuration with quantized scales.

    Raises:
        ConfigurationError: the type does not exist.
    """
    if type not in DOUBLE_QUANT_CONFIGS:
        raise ConfigurationError(
            f"type must be one of {', '.join(DOUBLE_QUANT_CONFIGS)}, got {type!r}"
            f"{did_you_mean(type, DOUBLE_QUANT_CONFIGS)}"
        )
    return RTNConfig(**DOUBLE_QUANT_CONFIGS[type])


__getattr__ = absent_names(globals())
