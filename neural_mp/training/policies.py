"""Keras dtype policies, and the switch for TensorFlow's graph rewrite with its loss scaling.

The switch is like `tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite`, which
supports neither Keras 3 optimizers nor BF16.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

from neural_mp.adaptors import registry
from neural_mp.adaptors.tensorflow.training import graph_rewrite_state
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions, merge_options, resolve_precision
from neural_mp.core.hardware import FORCE_VARIABLES, Support, detect
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import DYNAMIC
from neural_mp.errors import (
    ArgumentValueError,
    ConfigurationError,
    UnsupportedPrecisionError,
    did_you_mean,
)
from neural_mp.training.advice import devices
from neural_mp.util.system.environment import restore_users_environment

FLOAT32 = "float32"
#: Policies with float32 weights and 16-bit computation.
MIXED_POLICIES: Mapping[str, Precision] = {
    "mixed_bfloat16": Precision.BF16,
    "mixed_float16": Precision.FP16,
}
#: Accepted values of `device`.
DEVICES = ("cpu", "gpu")
#: Ends the rewrite of `enable_graph_rewrite`; empty if not enabled.
_enabled = ExitStack()


def supported_policies(device: str | None = None) -> Mapping[str, Support]:
    """Return for each mixed policy whether the hardware supports it, natively or not, and why.

    `mixed_bfloat16` is for CPUs and GPUs, `mixed_float16` for GPUs. A type that the hardware lacks
    is emulated if `FORCE_BF16=1` or `FORCE_FP16=1` is set.

    Args:
        device: `cpu` or `gpu`; default: the GPU if a framework can access one, else the CPU.

    Returns:
        Policy → `Support`, with `available`, `native` and `reason`.

    Raises:
        ConfigurationError: `device` is unknown.
    """
    if device is not None and device not in DEVICES:
        raise ConfigurationError(
            f"device must be 'cpu' or 'gpu', got {device!r}{did_you_mean(device, DEVICES)}"
        )
    names = [entry.name for entry in devices() if entry.is_accelerator] if device != "cpu" else []
    if device is None:
        device = "gpu" if names else "cpu"
    return {
        policy: _find_precision_support(p, device, names) for policy, p in MIXED_POLICIES.items()
    }


def set_policy(name: str, keep: Sequence[str] | str = ()) -> None:
    """Set the policy of all Keras layers created from now on.

    If a layer computes in float16, `compile` wraps the optimizer in a `LossScaleOptimizer`.
    Layers with an explicit `dtype` keep it.

    Args:
        name: `mixed_bfloat16`, `mixed_float16`, or `float32`, which resets the policy.
        keep: layers to keep in float32: names, paths, e.g. `encoder/dense`, or regular
            expressions that match a whole name or path. Includes the sublayers
            of a kept layer. `compile` raises an error if a name matches no layer.

    Raises:
        ConfigurationError: the policy is unknown, `keep` is not a list of names, or the graph
            rewrite is enabled.
        UnsupportedPrecisionError: the hardware lacks the 16-bit type, and it is not forced.
    """
    choices = (*MIXED_POLICIES, FLOAT32)
    if name not in choices:
        raise ArgumentValueError(
            f"policy must be one of {', '.join(choices)}, got {name!r}{did_you_mean(name, choices)}"
        )
    names = (keep,) if isinstance(keep, str) else keep
    if not isinstance(names, list | tuple | set) or not all(isinstance(n, str) for n in names):
        raise ArgumentValueError(
            f"keep must be names of layers, e.g. keep=('predictions',), got {keep!r}"
        )
    if name == FLOAT32 and names:
        raise ArgumentValueError(
            f"keep must be empty for policy float32, in which every layer is kept, got {keep!r}"
        )
    if name != FLOAT32:
        if rewrite_is_enabled():
            raise ArgumentValueError(
                f"policy {name} cannot be combined with the graph rewrite, which is enabled: both "
                f"convert ops to 16 bits; call disable_mixed_precision_graph_rewrite() first"
            )
        support = supported_policies()[name]
        if not support.available:
            variable = FORCE_VARIABLES[MIXED_POLICIES[name]]
            raise UnsupportedPrecisionError(
                f"this machine does not support policy {name}: {support.reason}. To emulate the "
                f"16-bit type, set {variable}=1; training is then slower than in float32"
            )
    _import_keras_policies().set_policy(name, tuple(names))


def kept_layers(model: object) -> tuple[str, ...]:
    """Return the layers of a Keras model kept in float32 by `set_policy(keep=…)`.

    `compile` calls this function automatically; a custom training loop can call it once the model
    is built.

    Args:
        model: a Keras model.

    Returns:
        The paths of the layers.

    Raises:
        ConfigurationError: a name matches no layer of this or of a previously passed model.
    """
    return _import_keras_policies().kept_layers(model)


def _import_keras_policies() -> Any:
    registry.require_framework("tensorflow", "Keras policies")
    from neural_mp.adaptors.tensorflow.training import policies

    return policies


def _find_precision_support(precision: Precision, device: str, gpus: Sequence[str]) -> Support:
    machine = detect()
    if device == "gpu" and not gpus:
        return Support(False, False, "no framework in use can access a GPU")
    if device == "gpu" and not machine.gpus:
        return Support(True, True, f"{gpus[0]} is available")
    support = machine.support(precision, device)
    if device == "gpu" or precision is Precision.BF16:
        return support
    why = "float16 requires a GPU and is emulated on a CPU"
    if precision in machine.forced:
        return Support(True, False, f"forced by {FORCE_VARIABLES[precision]}=1; {why}")
    return Support(False, False, why)


def enable_graph_rewrite(
    precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
) -> None:
    """Let TensorFlow run ops in 16 bits in every `tf.function`, `fit` and `predict`.

    Functions that ran before are included; functions that ran with the rewrite enabled keep the
    lists of that time. Functions compiled by XLA (`jit_compile=True`) are not affected.

    Args:
        precision: `bf16`, or on a GPU `fp16`; default: `amp.data_type`, else BF16.
        amp: edits of TensorFlow's lists, and the log folder. Unset options are read from the
            environment.

    Raises:
        UnsupportedPrecisionError: TensorFlow has no pass for the precision.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
        ConfigurationError: an edit does not fit TensorFlow's lists.
    """
    with ExitStack() as requested_now:
        requested_now.enter_context(graph_rewrite(precision, amp))
        disable_graph_rewrite()
        _enabled.push(requested_now.pop_all())


def disable_graph_rewrite() -> None:
    """Undo `enable_graph_rewrite`; no effect if not enabled."""
    _enabled.close()


@contextmanager
def graph_rewrite(
    precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
) -> Iterator[Precision]:
    """Enable the graph rewrite in this context; restore the previous state afterwards.

    Yields:
        The precision in use.
    """
    from neural_mp.adaptors.tensorflow import amp_pass

    chosen, settings = resolve_precision("the rewrite", precision, amp, restore_users_environment())
    with amp_pass.enable_pass(chosen, settings):
        yield chosen


def enable_mixed_precision_graph_rewrite(
    opt: object,
    loss_scale: object = DYNAMIC,
    *,
    precision: str | Precision | AmpDataType | None = None,
    amp: AutoMixedPrecisionOptions | None = None,
) -> Any:
    """Train in mixed precision: run ops in 16 bits, and scale the loss.

    TensorFlow runs ops in 16 bits in every `tf.function`, in `fit` and `predict`, and in every
    `tf.compat.v1.Session` created from now on, unless the config of a session disables the pass.
    Weights stay in float32. If an error is raised, nothing is enabled. Steps compiled by XLA are
    not affected, and warn: on a GPU, pass `jit_compile=False` to `compile`.

    Args:
        opt: the optimizer: of Keras 3 or of `tf.compat.v1.train`.
        loss_scale: `"dynamic"`, a constant number, a `LossScale`, or a `FixedLossScale` or
            `DynamicLossScale` of `tf.compat.v1.mixed_precision`.
        precision: `bf16` or `BFLOAT16`; on a GPU also `fp16` or `FLOAT16`. Default:
            `amp.data_type`, else FP16 with a GPU and BF16 without.
        amp: edits of TensorFlow's lists, and the log folder. Unset options are read from the
            environment.

    Returns:
        The optimizer to use in place of `opt`: a `LossScaleOptimizer`, or for TensorFlow 1 a
        `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`, with the same rule.

    Raises:
        ConfigurationError: `opt` already scales the loss or is not an optimizer; the loss scale
            is invalid; a mixed Keras policy is set; an edit does not fit TensorFlow's lists. Keras
            raises this error if a mixed policy is set later. As in TensorFlow, the error is also a
            ValueError.
        UnsupportedPrecisionError: TensorFlow has no pass for the precision, or none that works
            here; if oneDNN is disabled, the message explains how to enable it.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
    """
    registry.require_framework("tensorflow", "users of the graph rewrite")
    from neural_mp.adaptors.tensorflow.training import graph_rewrite_checks
    from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import with_loss_scaling

    graph_rewrite_checks.refuse_mixed_policy()
    wrapped = with_loss_scaling(opt, loss_scale)
    with ExitStack() as switched_on:
        chosen = switched_on.enter_context(graph_rewrite(_choose_precision(precision, amp), amp))
        if graph_rewrite_state.rewrite_is_enabled():
            graph_rewrite_state.switch_off()
        elif count := graph_rewrite_checks.sessions_without_rewrite():
            warnings.warn(
                f"number of open sessions without the graph rewrite: {count}. They were created "
                f"earlier; create sessions after enable_mixed_precision_graph_rewrite()",
                stacklevel=2,
            )
        switched_on.enter_context(graph_rewrite_checks.enable_for_sessions(chosen))
        switched_on.enter_context(graph_rewrite_checks.mixed_policies_refused())
        graph_rewrite_state.switch_on(switched_on.pop_all())
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Undo `enable_mixed_precision_graph_rewrite`; warn if not enabled.

    Sessions created meanwhile keep the rewrite. Optimizers continue to scale the loss, which is
    harmless.
    """
    if not graph_rewrite_state.rewrite_is_enabled():
        warnings.warn(
            "disable_mixed_precision_graph_rewrite() has no effect: the graph rewrite is not "
            "enabled, or was disabled before",
            stacklevel=2,
        )
        return
    graph_rewrite_state.switch_off()


def _choose_precision(precision: object, amp: AutoMixedPrecisionOptions | None) -> Any:
    """Return the precision, invalid values unchanged; None if set by `amp` or a variable."""
    precisions = {kind.value: kind.precision for kind in AmpDataType}
    name = str(precision.value if isinstance(precision, Enum) else precision).lower()
    chosen = precisions.get(name, precision)
    if (
        chosen is not None
        or merge_options({"amp.{option}": amp}, restore_users_environment()).data_type
    ):
        return chosen
    import tensorflow as tf

    return Precision.FP16 if tf.config.list_physical_devices("GPU") else Precision.BF16
