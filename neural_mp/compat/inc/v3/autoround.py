"""`AutoRoundConfig` of INC 3.x: named schemes, and a mean number of bits as the target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

from neural_mp.compat.inc.import_aliases import NotHereError
from neural_mp.compat.inc.log import logger
from neural_mp.compat.inc.v3.algorithm_config import WeightOnlyConfig
from neural_mp.compat.inc.v3.devices import is_client
from neural_mp.core.precision import INTEGERS, Precision, parse_precisions
from neural_mp.errors import ConfigurationError
from neural_mp.space import OpConstraint

#: Schemes of weights alone: `W4A16`, `W2A16G64`.
_WEIGHTS = re.compile(r"W(\d)A16(?:G(\d+))?(?:_MIXED)?")
_GROUP_SIZE = 128


class AutoRoundConfig(WeightOnlyConfig):
    """Weights rounded with calibration data, by a scheme or by a mean number of bits.

    With `target_bits`, the precision of each layer is searched: the most accurate model whose
    weights take that many bits on average.
    """

    name: ClassVar[str] = "autoround"
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
        bits, size = self._parse_scheme(self.options["scheme"])
        options: dict[str, Any] = {
            "bits": bits,
            "group_size": size,
            "use_sym": True,
            "dtype": "int",
        }
        chosen = {k: v if self.options[k] is None else self.options[k] for k, v in options.items()}
        plain = _Weights(**chosen)
        plain.iters = self.options["iters"]
        return plain

    def _parse_scheme(self, scheme: Any) -> tuple[int, int]:
        if isinstance(scheme, Mapping):
            return int(scheme.get("bits", 4)), int(scheme.get("group_size", _GROUP_SIZE))
        match = _WEIGHTS.fullmatch(str(scheme).upper())
        if match is None:
            raise NotHereError(
                f"AutoRoundConfig(scheme={scheme!r}) is not supported: no CPU kernel here computes "
                f"in this type; use scheme='W4A16' (or W2A16, W3A16, W8A16), "
                f"or INT8StaticQuantConfig for INT8"
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

    @classmethod
    def get_config_set_for_tuning(cls) -> AutoRoundConfig:
        """Return the configurations to try if a script names none."""
        return cls(bits=[4, 8])


class _Weights(WeightOnlyConfig):
    """The options of a weight that a scheme means; without steps, rounding to nearest."""

    defaults: ClassVar[Mapping[str, Any]] = {
        **{"bits": 4, "group_size": _GROUP_SIZE, "use_sym": True, "dtype": "int", "iters": 200}
    }

    @property
    def roundings(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("rtn",) if self.options["iters"] == 0 else AutoRoundConfig.roundings


def get_default_AutoRound_config(processor_type: object = None) -> AutoRoundConfig:  # noqa: N802
    """Return the default configuration of a kind of processor, by default of a server."""
    return AutoRoundConfig(use_layer_wise=is_client(processor_type))
