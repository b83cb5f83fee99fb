"""Names of Intel Extension for TensorFlow (ITEX) that configure mixed precision.

Scripts run with one changed import, `import neural_mp.compat.itex as itex`. Names and meaning are
those of ITEX's "Python APIs"; TensorFlow's own pass does the work, see `enable_graph_rewrite`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions
from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.training import disable_graph_rewrite, enable_graph_rewrite
from neural_mp.util.validators import StrictOptions

logger = logging.getLogger(__name__)

DEFAULT_DATA_TYPE, FLOAT16, BFLOAT16 = AmpDataType
ON, OFF = True, False
#: Backends that ITEX names.
_BACKENDS = ("CPU", "GPU", "AUTO")
#: Options of `GraphOptions` without effect: TensorFlow chooses its own graph optimizations.
_WITHOUT_EFFECT = ("onednn_graph", "layout_opt", "remapper", "sharding")


@dataclass
class GraphOptions(StrictOptions):
    """Options of graph optimization.

    Attributes:
        auto_mixed_precision: `ON` or `OFF`.
        auto_mixed_precision_options: data type and edits of the lists.
        onednn_graph, layout_opt, remapper, sharding: no effect.
    """

    auto_mixed_precision: bool | None = None
    auto_mixed_precision_options: AutoMixedPrecisionOptions | None = None
    onednn_graph: bool | None = None
    layout_opt: bool | None = None
    remapper: bool | None = None
    sharding: Any = None


@dataclass
class GPUOptions(StrictOptions):
    """Options of GPUs, without effect.

    Attributes:
        onednn_graph, layout_opt, remapper, auto_mixed_precision: no effect.
    """

    onednn_graph: bool | None = None
    layout_opt: bool | None = None
    remapper: bool | None = None
    auto_mixed_precision: bool | None = None


@dataclass
class ConfigProto(StrictOptions):
    """Configuration for `set_config`.

    Attributes:
        graph_options: see `GraphOptions`.
        gpu_options, debug_options: no effect.
    """

    graph_options: GraphOptions = field(default_factory=GraphOptions)
    gpu_options: Any = None
    debug_options: Any = None


@dataclass
class _State:
    """Values that `get_config` and `get_backend` return."""

    config: ConfigProto = field(default_factory=ConfigProto)
    backend: str = "CPU"


_state = _State()


def set_config(config: ConfigProto | None = None) -> None:
    """Enable or disable mixed precision in TensorFlow for all functions of this process.

    Args:
        config: with `graph_options.auto_mixed_precision = ON`, ops run in 16 bits: in BF16, or in
            the data type of the options; default: `OFF`.

    Raises:
        ConfigurationError: `config` is of another type, or an option is invalid.
        UnsupportedPrecisionError: TensorFlow has no pass for the data type here.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
    """
    config = ConfigProto() if config is None else config
    if not isinstance(config, ConfigProto):
        raise ConfigurationError(f"config must be a ConfigProto, got {config!r}")
    options = config.graph_options
    for name in _WITHOUT_EFFECT:
        if getattr(options, name) is not None:
            logger.warning(
                "graph_options.%s has no effect: TensorFlow optimizes graphs as ever", name
            )
    if options.auto_mixed_precision:
        enable_graph_rewrite(amp=options.auto_mixed_precision_options)
    else:
        disable_graph_rewrite()
    _state.config = config


def get_config() -> ConfigProto:
    """Return the configuration of the last `set_config`."""
    return _state.config


def set_backend(backend: str, config: ConfigProto | None = None) -> None:
    """Configure as `set_config` does; the device is chosen by TensorFlow.

    Args:
        backend: `CPU`, `GPU` or `AUTO`, in any case.
        config: see `set_config`.

    Raises:
        ConfigurationError: the backend is unknown.
        NeuralMPError: as for `set_config`.
    """
    name = str(backend).upper()
    if name not in _BACKENDS:
        raise ConfigurationError(
            f"backend must be one of {', '.join(_BACKENDS)}, got {backend!r}"
            f"{did_you_mean(name, _BACKENDS)}"
        )
    set_config(config)
    _state.backend = name


def get_backend() -> str:
    """Return the backend of the last `set_backend`, by default `CPU`."""
    return _state.backend


__all__ = [
    "BFLOAT16",
    "DEFAULT_DATA_TYPE",
    "FLOAT16",
    "OFF",
    "ON",
    "AutoMixedPrecisionOptions",
    "ConfigProto",
    "GPUOptions",
    "GraphOptions",
    "get_backend",
    "get_config",
    "set_backend",
    "set_config",
]
