"""Switch for TensorFlow's graph rewrite, with the loss scaling that it needs.

Like `tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite`, which supports neither
Keras 3 optimizers nor BF16.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import Any

from neural_mp.adaptors import registry
from neural_mp.adaptors.tensorflow.training import graph_rewrite_state
from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions, merge_options, resolve_precision
from neural_mp.core.loss_scale import DYNAMIC
from neural_mp.core.precision import Precision
from neural_mp.util.system.environment import restore_users_environment

#: Ends the rewrite of `enable_graph_rewrite`; empty if not enabled.
_enabled = ExitStack()


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
