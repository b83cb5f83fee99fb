"""Capture of recurrent layers as one op each, with the length of their sequences left free.

torch.export keeps `aten.lstm` and its kin as single ops, yet works out the shapes of their results
by unrolling them step by step, which fixes the length to that of the example. Here the shapes are
taken from the arguments, so nothing depends on the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

aten = torch.ops.aten

#: Op types of recurrent layers, each of which torch runs as one op.
RECURRENT_TYPES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_STEPS = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def free_lengths() -> Iterator[None]:
    """Trace recurrent layers without a look at the length of their sequences."""
    ops = [
        getattr(getattr(aten, kind), overload)
        for kind in RECURRENT_TYPES
        for overload in ("input", "data")
    ]
    before = {op: (op.py_kernels[_STEPS], decomposition_table[op]) for op in ops}
    try:
        for op, (unrolled, _) in before.items():
            shaped = partial(_shaped, op, unrolled)
            _trace_as(op, shaped, shaped)
        yield
    finally:
        for op, kernels in before.items():
            _trace_as(op, *kernels)


def _trace_as(op: Any, kernel: Callable[..., Any], entry: Callable[..., Any]) -> None:
    """Let a module be traced by the kernel of an op, and a program anew by its table entry."""
    op.py_kernels[_STEPS] = kernel
    op._dispatch_cache.clear()
    decomposition_table[op] = entry


def _shaped(op: Any, steps: Callable[..., Any], *args: Any) -> Any:
    """The results of an op as far as their shapes go; those of real tensors are computed.

    Args:
        op: a recurrent layer.
        steps: torch's own kernel for it, which unrolls it.
        args: what the op is called with.
    """
    if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
        return steps(*args)
    packed = op._overloadname == "data"
    sequence, state = args[0], args[2 if packed else 1]
    bidirectional = args[8 if packed else 7]
    states = state if isinstance(state, list | tuple) else (state,)
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    result = sequence.new_empty((*sequence.shape[:-1], width))
    return result, *(each.new_empty(each.shape) for each in states)
