"""TensorFlow's own graph rewrite, in training and inference, with the lists as a user wants them.

Nothing is converted: TensorFlow puts ops into 16 bits whenever it optimises a graph.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from neural_mp.amp import AutoMixedPrecisionOptions, settle
from neural_mp.precision import Precision, parse_precisions


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
    from neural_mp.adaptors.tensorflow import rewrite

    settings = settle({"amp.{option}": amp}, os.environ)
    chosen = settings.data_type or Precision.BF16
    if precision is not None:
        (chosen,) = parse_precisions(precision)
    rewrite.enable(chosen, settings)


def disable_graph_rewrite() -> None:
    """Undo `enable_graph_rewrite`; without effect where it was not called."""
    from neural_mp.adaptors.tensorflow import rewrite

    rewrite.disable()


@contextmanager
def graph_rewrite(
    precision: str | Precision | None = None, amp: AutoMixedPrecisionOptions | None = None
) -> Iterator[None]:
    """`enable_graph_rewrite` for a while; what was set before is set again afterwards."""
    from neural_mp.adaptors.tensorflow import rewrite

    nested, before = rewrite.is_on(), rewrite.state()
    enable_graph_rewrite(precision, amp)
    try:
        yield
    finally:
        if nested:
            rewrite.restore(before)
        else:
            rewrite.disable()
