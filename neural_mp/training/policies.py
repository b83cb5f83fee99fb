"""Keras dtype policies: support on this machine, and the global policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.adaptors import registry
from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.core.hardware import FORCE_VARIABLES, Support, detect
from neural_mp.core.precision import Precision
from neural_mp.errors import (
    ArgumentValueError,
    ConfigurationError,
    UnsupportedPrecisionError,
    did_you_mean,
)
from neural_mp.training.models import devices

FLOAT32 = "float32"
#: Policies with float32 weights and 16-bit computation.
MIXED_POLICIES: Mapping[str, Precision] = {
    "mixed_bfloat16": Precision.BF16,
    "mixed_float16": Precision.FP16,
}
#: Accepted values of `device`.
DEVICES = ("cpu", "gpu")


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
