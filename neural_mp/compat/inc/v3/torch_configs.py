"""`neural_compressor.torch.quantization`: the configuration classes for PyTorch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.import_aliases import NotHereError, make_absent_getter
from neural_mp.compat.inc.script_log import logger
from neural_mp.compat.inc.v3.base_config import (
    DENSE,
    AlgorithmConfig,
    Int8Config,
    PrecisionConfig,
    WeightOnlyConfig,
)
from neural_mp.compat.inc.v3.devices import is_client
from neural_mp.core.enums import Approach
from neural_mp.core.precision import INTEGERS, Precision, parse_precisions
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
    tried: ClassVar[Mapping[str, Any]] = {"use_sym": [True, False], "group_size": [32, 128]}
    defaults: ClassVar[Mapping[str, Any]] = {
        **_WEIGHT,
        **_RANGES,
        "use_layer_wise": True,
        "model_path": "",
        **_DOUBLE,
    }


class GPTQConfig(WeightOnlyConfig):
    """Weights whose rounding errors are compensated with calibration data."""

    name: ClassVar[str] = "gptq"
    tried: ClassVar[Mapping[str, Any]] = {"use_sym": [False, True]}
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


class AWQConfig(WeightOnlyConfig):
    """Weights scaled by the magnitudes of their inputs before rounding."""

    name: ClassVar[str] = "awq"
    tried: ClassVar[Mapping[str, Any]] = {"bits": [4, 8]}
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


class TEQConfig(WeightOnlyConfig):
    """Trained scales of inputs, which are chosen as by AWQ here."""

    name: ClassVar[str] = "teq"
    tried: ClassVar[Mapping[str, Any]] = {"bits": [4, 8]}
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


class HQQConfig(WeightOnlyConfig):
    """Weights with offsets that suit the many small ones better than the few large ones."""

    name: ClassVar[str] = "hqq"
    tried: ClassVar[Mapping[str, Any]] = {"bits": [4, 8]}
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


class DynamicQuantConfig(Int8Config):
    """INT8 with ranges of inputs computed on every run."""

    name: ClassVar[str] = "pt2e_dynamic_quant"
    approach: ClassVar[Approach] = Approach.DYNAMIC
    defaults: ClassVar[Mapping[str, Any]] = {
        **_INT8,
        "w_granularity": "per_tensor",
        "act_algo": "kl",
    }


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
        """Raise NotHereError."""
        raise NotHereError(
            "FP8Config is not supported: no CPU kernel computes in float8; use "
            "INT8StaticQuantConfig, or MixedPrecisionConfig(dtype='bf16'); weights alone are "
            "stored in float8 by a plan, 'fp8_e4m3 symmetric per_channel'"
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
    tried: ClassVar[Mapping[str, Any]] = {"alpha": np.arange(0.1, 1.0, 0.1).tolist()}
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


class MixedPrecisionConfig(PrecisionConfig):
    """Layers in 16 bits."""

    name: ClassVar[str] = "mixed_precision"
    tried: ClassVar[Mapping[str, Any]] = {"dtype": ["fp16", "bf16", "fp32"]}
    types: ClassVar[frozenset[str]] = DENSE | {"Conv1d", "Conv2d", "Conv3d"}
    defaults: ClassVar[Mapping[str, Any]] = {"dtype": "fp16"}


#: Schemes of weights alone: `W4A16`, `W2A16G64`.
_WEIGHTS = re.compile(r"W(\d)A16(?:G(\d+))?(?:_MIXED)?")
_GROUP_SIZE = 128


class AutoRoundConfig(WeightOnlyConfig):
    """Weights rounded with calibration data, by a scheme or by a mean number of bits.

    With `target_bits`, the precision of each layer is searched: the most accurate model whose
    weights take that many bits on average.
    """

    name: ClassVar[str] = "autoround"
    tried: ClassVar[Mapping[str, Any]] = {"bits": [4, 8]}
    roundings: ClassVar[tuple[str, ...]] = ("autoround",)
    lists: ClassVar[frozenset[str]] = frozenset(
        {"options", "shared_layers", "to_quant_block_names"}
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        **dict.fromkeys(("bits", "group_size", "use_sym", "dtype", "act_bits", "act_group_size")),
        **dict.fromkeys(("act_sym", "act_dtype", "act_dynamic", "super_bits", "super_group_size")),
        "enable_full_range": False,
        "batch_size": 8,
        "amp": True,
        "lr_scheduler": None,
        "enable_quanted_input": True,
        "enable_minmax_tuning": True,
        "lr": None,
        "minmax_lr": None,
        "low_gpu_mem_usage": False,
        "iters": 200,
        "seqlen": 2048,
        "nsamples": 128,
        "sampler": "rand",
        "seed": 42,
        "nblocks": 1,
        "gradient_accumulate_steps": 1,
        "not_use_best_mse": False,
        "dynamic_max_gap": -1,
        "scale_dtype": "fp16",
        "use_layer_wise": True,
        "to_quant_block_names": None,
        "export_format": "auto_round",
        "enable_norm_bias_tuning": False,
        "enable_torch_compile": False,
        "scheme": "W4A16",
        "device_map": 0,
        "quant_nontext_module": False,
        "extra_data_dir": None,
        "processor": None,
        "image_processor": None,
        "template": None,
        "truncation": False,
        "quant_lm_head": False,
        "enable_adam": False,
        "target_bits": None,
        "options": ("MXFP4", "MXFP8"),
        "shared_layers": None,
        "ignore_scale_zp_bits": False,
        **dict.fromkeys(("auto_scheme_device_map", "auto_scheme_batch_size", "tokenizer")),
        "auto_scheme_method": "default",
        "output_dir": "./tmp_auto_round",
        "low_cpu_mem_usage": True,
        "disable_opt_rtn": True,
        "dataset": None,
        "model_free": False,
    }

    def constraint(self) -> OpConstraint:
        """Return the constraint of a dense layer, by the scheme and the options besides it."""
        return self._weights().constraint()

    def warn_without_effect(self) -> None:
        """Log warnings for options without effect, and for weights of another type than asked."""
        self._weights().warn_without_effect()

    def _weights(self) -> _Weights:
        bits, size = self._parse_scheme()
        options = {"bits": bits, "group_size": size, "use_sym": True, "dtype": "int"}
        chosen = {name: self.options[name] for name in options if self.options[name] is not None}
        weights = _Weights(**{**options, **chosen})
        weights.iters = self.options["iters"]
        return weights

    def _parse_scheme(self) -> tuple[int, int]:
        """Return bits and group size."""
        scheme = self.options["scheme"]
        if isinstance(scheme, Mapping):
            return int(scheme.get("bits", 4)), int(scheme.get("group_size", _GROUP_SIZE))
        match = _WEIGHTS.fullmatch(str(scheme).upper())
        if match is None:
            raise NotHereError(
                f"AutoRoundConfig(scheme={scheme!r}) is not supported: no CPU kernel here computes "
                f"in this type; use scheme='W4A16' (or W2A16, W3A16, W8A16), "
                f"INT8StaticQuantConfig for INT8, or a plan with 'mxfp4 symmetric per_group 32'"
            )
        return int(match[1]), int(match[2] or _GROUP_SIZE)

    @property
    def searched(self) -> tuple[Precision, ...]:
        """The precisions to search for `target_bits`: those named by `options`, or all.

        Raises:
            ConfigurationError: `target_bits` is not a number of bits.
        """
        target = self.options["target_bits"]
        if not isinstance(target, int | float) or not 1 < target <= 32:
            raise ConfigurationError(
                f"target_bits must be a number of bits from 2 to 32, got {target!r}"
            )
        requested = self.options["options"]
        schemes = requested.split(",") if isinstance(requested, str) else requested
        named = [_WEIGHTS.fullmatch(str(scheme).strip().upper()) for scheme in schemes]
        bits = {int(match[1]) for match in named if match is not None} & INTEGERS.keys()
        if not bits:
            logger.warning(
                "AutoRoundConfig.options=%r names no scheme with a kernel here; 2, 3, 4 and 8 bits "
                "are searched",
                requested,
            )
        return tuple(parse_precisions([INTEGERS[b] for b in sorted(bits or INTEGERS)]))


class _Weights(WeightOnlyConfig):
    """The options of a weight that a scheme means; without steps, rounding to nearest."""

    defaults: ClassVar[Mapping[str, Any]] = {**_WEIGHT, "group_size": _GROUP_SIZE, "iters": 200}

    @property
    def roundings(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rtn",) if self.options["iters"] == 0 else AutoRoundConfig.roundings


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
        AutoRoundConfig,
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


def get_default_AutoRound_config(processor_type: object = None) -> AutoRoundConfig:  # noqa: N802
    """Return the default configuration of a kind of processor, by default of a server."""
    return AutoRoundConfig(use_layer_wise=is_client(processor_type))


#: The default configuration of these algorithms has no options.
get_default_awq_config = AWQConfig
get_default_teq_config = TEQConfig
get_default_hqq_config = HQQConfig
get_default_dynamic_config = DynamicQuantConfig
get_default_static_config = INT8StaticQuantConfig
get_default_fp8_config = FP8Config
get_default_sq_config = SmoothQuantConfig
get_default_mixed_precision_config = MixedPrecisionConfig
get_default_mixed_precision_config_set = MixedPrecisionConfig.get_config_set_for_tuning


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


__getattr__ = make_absent_getter(globals())
