"""TensorFlow's graph rewrite with the loss scaling it needs, switched on by one call.

As `tf.compat.v1.mixed_precision.enable_mixed_precision_graph_rewrite`, which takes no optimizer of
Keras 3 and knows FP16 alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

from neural_mp.adaptors import registry
from neural_mp.adaptors.tensorflow.training import graph_rewrite_state
from neural_mp.amp import AmpDataType, AutoMixedPrecisionOptions, requested, settle
from neural_mp.core.loss_scale import DYNAMIC
from neural_mp.core.precision import Precision
from neural_mp.util.environment import users_environment

if TYPE_CHECKING:
    from neural_mp.adaptors.tensorflow.amp_pass import Request

#: What `enable_graph_rewrite` asked for last.
_enabled: Request | None = None


def enable_graph_rewrite(
    precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
) -> None:
    """Let TensorFlow put ops into 16 bits, in every `tf.function`, `fit` and `predict`.

    It counts for functions that ran before, too; those that have run with the rewrite on keep the
    lists of that time. Functions compiled by XLA (`jit_compile=True`) it does not see.

    Args:
        precision: `bf16`, or on a GPU `fp16`; by default what `amp.data_type` says, else BF16.
        amp: edits of TensorFlow's lists, and where it is to write what it did. What is not given
            is looked up in the environment, as everywhere.

    Raises:
        UnsupportedPrecisionError: TensorFlow has no pass for the precision.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
        ConfigurationError: an edit does not fit TensorFlow's lists.
    """
    global _enabled
    made = _requested(precision, amp)
    disable_graph_rewrite()
    _enabled = made


def disable_graph_rewrite() -> None:
    """Undo `enable_graph_rewrite`; without effect where it was not called."""
    global _enabled
    if _enabled is not None:
        _withdraw(_enabled)
    _enabled = None


@contextmanager
def graph_rewrite(
    precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
) -> Iterator[Precision]:
    """`enable_graph_rewrite` for a while; what counted before counts again afterwards.

    Yields:
        The precision that counts.
    """
    made = _requested(precision, amp)
    try:
        yield made.precision
    finally:
        _withdraw(made)


def _requested(precision: str | Precision | None, amp: AutoMixedPrecisionOptions | None) -> Request:
    from neural_mp.adaptors.tensorflow import amp_pass

    chosen, settings = requested("the rewrite", precision, amp, users_environment())
    return amp_pass.request(chosen, settings)


def _withdraw(made: Request) -> None:
    from neural_mp.adaptors.tensorflow import amp_pass

    amp_pass.withdraw(made)


def enable_mixed_precision_graph_rewrite(
    opt: object,
    loss_scale: object = DYNAMIC,
    *,
    precision: str | Precision | AmpDataType | None = None,
    amp: AutoMixedPrecisionOptions | None = None,
) -> Any:
    """Train in mixed precision: ops run in 16 bits, and the loss is scaled.

    TensorFlow puts ops into 16 bits in every `tf.function`, in `fit` and `predict`, and in every
    `tf.compat.v1.Session` made from now on, unless the config of a session has the pass off.
    Weights stay in float32. Refusals come before anything is switched on. Steps that XLA compiles
    are out of its reach, of which they warn: on a GPU, `compile` needs `jit_compile=False`.

    Args:
        opt: the optimizer to train with: one of Keras 3, or of `tf.compat.v1.train`.
        loss_scale: `"dynamic"`, a number, which stays, a `LossScale`, or a `FixedLossScale` or
            `DynamicLossScale` of `tf.compat.v1.mixed_precision`.
        precision: `bf16` or `BFLOAT16`; on a GPU also `fp16` or `FLOAT16`. By default what
            `amp.data_type` says, else FP16 where there is a GPU and BF16 where there is none.
        amp: edits of TensorFlow's lists, and where it is to write what it did; what is not given
            is looked up in the environment, as everywhere.

    Returns:
        The optimizer to use in place of `opt`: a `LossScaleOptimizer`, or for one of TensorFlow 1 a
        `tf.compat.v1.mixed_precision.MixedPrecisionLossScaleOptimizer`. Both go by the same rule.

    Raises:
        ConfigurationError: `opt` scales the loss already, or is no optimizer; the loss scale is
            none; a mixed Keras policy is set; an edit does not fit TensorFlow's lists. If such a
            policy is set later, the first step of the optimizer raises it.
        UnsupportedPrecisionError: TensorFlow has no pass for the precision, or none that works
            here; where oneDNN is off, the message says how to turn it on.
        UnknownOperatorError: an edit names an op type that TensorFlow does not have.
    """
    registry.require_framework("tensorflow", "users of the graph rewrite")
    from neural_mp.adaptors.tensorflow.training import graph_rewrite_checks
    from neural_mp.adaptors.tensorflow.training.v1_loss_scale import with_loss_scaling

    graph_rewrite_checks.refuse_mixed_policy()
    wrapped = with_loss_scaling(opt, loss_scale)
    with ExitStack() as switched_on:
        chosen = switched_on.enter_context(graph_rewrite(_chosen(precision, amp), amp))
        if graph_rewrite_state.rewrite_is_enabled():
            graph_rewrite_state.switch_off()
        elif count := graph_rewrite_checks.sessions_without_rewrite():
            warnings.warn(
                f"sessions that are open and go on without the graph rewrite: {count}. They were "
                f"made before; make sessions after enable_mixed_precision_graph_rewrite",
                stacklevel=2,
            )
        switched_on.enter_context(graph_rewrite_checks.sessions_follow(chosen))
        graph_rewrite_state.switch_on(switched_on.pop_all())
    return wrapped


def disable_mixed_precision_graph_rewrite() -> None:
    """Undo `enable_mixed_precision_graph_rewrite`; warn where nothing is enabled.

    Sessions that were made meanwhile keep the rewrite. Optimizers go on to scale the loss, which
    does no harm.
    """
    if not graph_rewrite_state.rewrite_is_enabled():
        warnings.warn(
            "disable_mixed_precision_graph_rewrite() has no effect: the graph rewrite is not "
            "enabled, or was disabled before",
            stacklevel=2,
        )
        return
    graph_rewrite_state.switch_off()


def _chosen(precision: object, amp: AutoMixedPrecisionOptions | None) -> Any:
    """The precision, or what is said in its place; None where `amp` or a variable names it."""
    words = {kind.value: kind.precision for kind in AmpDataType}
    word = str(precision.value if isinstance(precision, Enum) else precision).lower()
    chosen = words.get(word, precision)
    if chosen is not None or settle({"amp.{option}": amp}, users_environment()).data_type:
        return chosen
    import tensorflow as tf

    return Precision.FP16 if tf.config.list_physical_devices("GPU") else Precision.BF16
