"""TensorFlow's own graph rewrite, in training and inference, with the lists as a user wants them.

Nothing is converted: TensorFlow puts ops into 16 bits whenever it optimises a graph.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from neural_mp.amp import AutoMixedPrecisionOptions, requested
from neural_mp.core.environment import users_environment
from neural_mp.core.precision import Precision

if TYPE_CHECKING:
    from neural_mp.adaptors.tensorflow.rewrite import Request

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


def _requested(precision: str | Precision | None, amp: Any) -> Request:
    from neural_mp.adaptors.tensorflow import rewrite

    chosen, settings = requested("the rewrite", precision, amp, users_environment())
    return rewrite.request(chosen, settings)


def _withdraw(made: Request) -> None:
    from neural_mp.adaptors.tensorflow import rewrite

    rewrite.withdraw(made)
