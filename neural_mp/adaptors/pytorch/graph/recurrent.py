"""Recurrent layers: capture as single ops with dynamic sequence length, and INT8 kernels.

torch.export keeps `aten.lstm` etc. as single ops, but infers result shapes by unrolling, which
fixes the length to that of the example. Here shapes follow from the arguments, independent of the
length.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch import versions
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.fusion import is_node

aten = torch.ops.aten

#: Op types of recurrent layers, each executed as one op.
RECURRENT_TYPES = ("lstm", "gru", "rnn_tanh", "rnn_relu")
_STEPS = torch._C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def free_lengths() -> Iterator[None]:
    """Trace recurrent layers without unrolling, so that their length stays dynamic."""
    ops = [
        getattr(getattr(aten, kind), overload)
        for kind in RECURRENT_TYPES
        for overload in ("input", "data")
    ]
    originals = {op: (op.py_kernels[_STEPS], decomposition_table[op]) for op in ops}
    try:
        for op, (unrolled, _) in originals.items():
            shaped = partial(_make_empty_results, op, unrolled)
            _set_trace_kernels(op, shaped, shaped)
        yield
    finally:
        for op, kernels in originals.items():
            _set_trace_kernels(op, *kernels)


def _set_trace_kernels(
    op: torch._ops.OpOverload, kernel: Callable[..., Any], entry: Callable[..., Any]
) -> None:
    """Set the kernel used when tracing a module, and the table entry used when retracing."""
    op.py_kernels[_STEPS] = kernel
    op._dispatch_cache.clear()
    decomposition_table[op] = entry


def _make_empty_results(op: torch._ops.OpOverload, steps: Callable[..., Any], *args: Any) -> Any:
    """Return empty results of a recurrent layer; for real tensors, the results of `steps`."""
    if not any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves(args)):
        return steps(*args)
    packed = op._overloadname == "data"
    sequence, state = args[0], args[2 if packed else 1]
    bidirectional = args[8 if packed else 7]
    states = state if isinstance(state, list | tuple) else (state,)
    width = states[0].shape[-1] * (2 if bidirectional else 1)
    result = sequence.new_empty((*sequence.shape[:-1], width))
    return result, *(tensor.new_empty(tensor.shape) for tensor in states)


LSTM, GRU = aten.lstm.input, aten.gru.input
#: Layers with an integer kernel.
RECURRENT_INT8 = (LSTM, GRU)
#: Overloads for packed sequences.
_PACKED = (aten.lstm.data, aten.gru.data)
_PLAIN = (aten.rnn_tanh.input, aten.rnn_relu.input, aten.rnn_tanh.data, aten.rnn_relu.data)
#: Names of the executed kernels in the profiler's trace.
KERNELS = ("aten::quantized_lstm", "aten::quantized_gru")
#: Number of stacked layers, whether each has two directions, whether the batch is the first axis.
_Layout = tuple[int, bool, bool]
#: Number of tensors per cell, with and without biases: two weights, two biases.
_PER_CELL = {True: 4, False: 2}


def find_recurrent_obstacle(module: GraphModule, node: Node) -> str | None:
    """Return the reason why a recurrent layer cannot run in INT8; None if it can."""
    if node.target in _PACKED:
        return "its sequences are packed; the integer kernel requires padded sequences"
    if node.target in _PLAIN:
        return "integer kernels exist for LSTM and GRU only"
    args = fx.get_arguments(node)
    weights = [fx.get_constant(module, value) for value in args["params"]]
    if any(weight is None for weight in weights):
        return "its weight is computed, not constant"
    if any(weight is not None and weight.dtype != torch.float32 for weight in weights):
        return "its weight is not float32"
    # One cell per direction of every stacked layer.
    cells = int(args["num_layers"]) * (2 if args["bidirectional"] else 1)
    if len(weights) != cells * _PER_CELL[args["has_biases"]]:
        return "its outputs are projected (proj_size), which the integer kernel does not support"
    return find_kernel_obstacle()


@lru_cache(maxsize=1)
def find_kernel_obstacle() -> str | None:
    """Return why torch's integer recurrent kernels do not run here; None if they do."""
    weight = torch.ones(4, 1, dtype=torch.int8), torch.ones(4)
    recurrent, bias = (weight[0], weight[1]), torch.zeros(4)
    try:
        cell = _pack_cell(weight, recurrent, bias, bias)
        state = torch.zeros(1, 1, 1)
        with torch.no_grad():
            _run_recurrent(LSTM, torch.ones(1, 1, 1), [state, state], [cell], (1, False, False))
    except Exception as error:  # noqa: BLE001 (whatever a build that lacks a part of it raises)
        return f"torch's integer kernel fails on this machine: {str(error).splitlines()[0]}"
    return None


def _pack_cell(
    weight: Sequence[torch.Tensor],
    recurrent: Sequence[torch.Tensor],
    bias: torch.Tensor,
    recurrent_bias: torch.Tensor,
) -> Any:
    """Return a packed cell from two weights, each as integers and scales, and two biases."""
    packed = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantiz.*", category=UserWarning)
        for (integers, scales), added in ((weight, bias), (recurrent, recurrent_bias)):
            zeros = torch.zeros(len(scales), dtype=torch.long)
            stored = torch._make_per_channel_quantized_tensor(integers, scales.double(), zeros, 0)
            packed.append(torch.ops.quantized.linear_prepack(stored, added))
    # Accumulation saturates without VNNI, unless activations are reduced to 7 bits.
    reduced = not versions.has_exact_byte_products()
    make = torch.ops.quantized.make_quantized_cell_params_dynamic
    return make(*packed, bias, recurrent_bias, reduced)


def _run_recurrent(
    kind: object, x: torch.Tensor, states: Sequence[torch.Tensor], cells: list[Any], layout: _Layout
) -> Any:
    layers, bidirectional, batch_first = layout
    shape = (True, layers, 0.0, False, bidirectional, batch_first)
    if kind is LSTM:
        return aten.quantized_lstm.input(
            x, list(states), cells, *shape, dtype=torch.qint8, use_dynamic=True
        )
    return aten.quantized_gru.input(x, states[0], cells, *shape)


class QuantizedRecurrent(nn.Module):
    """Packed cells of one LSTM or GRU: one per direction of every stacked layer."""

    def __init__(self, kind: object, cells: list[Any], layout: _Layout) -> None:
        super().__init__()
        self._kind, self._cells, self._layout = kind, cells, layout

    def forward(self, x: torch.Tensor, *states: torch.Tensor) -> Any:
        """Return the outputs of all steps and the last states, as float32."""
        floats = [state.float() for state in states]
        return _run_recurrent(self._kind, x.float(), floats, self._cells, self._layout)

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedRecurrent:
        # Packed cells cannot be copied, and are never written to.
        return QuantizedRecurrent(self._kind, self._cells, self._layout)


def run_recurrent(layer: QuantizedRecurrent, x: torch.Tensor, *states: torch.Tensor) -> Any:
    """Run a recurrent layer in INT8."""
    return layer(x, *states)


def lower_recurrent(module: GraphModule, node: Node) -> None:
    """Call the integer kernel instead of a recurrent layer with quantized weights."""
    args = fx.get_arguments(node)
    quantized = any(is_node(part, ops.dequantize_weight) for part in args["params"])
    if find_kernel_obstacle() is not None or not quantized:
        return
    per_cell = _PER_CELL[args["has_biases"]]
    cells = []
    for first in range(0, len(args["params"]), per_cell):
        tensors = args["params"][first : first + per_cell]
        weight, recurrent = (
            [fx.get_attribute(module, str(part.target)) for part in dequantized.args]
            for dequantized in tensors[:2]
        )
        biases = [
            fx.get_attribute(module, str(part.target)).detach().float() for part in tensors[2:]
        ]
        zeros = torch.zeros(len(weight[1]))
        bias, recurrent_bias = biases or (zeros, zeros)
        cells.append(_pack_cell(weight, recurrent, bias, recurrent_bias))
    layout = (int(args["num_layers"]), bool(args["bidirectional"]), bool(args["batch_first"]))
    name = f"{node.name}_int8"
    module.add_module(name, QuantizedRecurrent(node.target, cells, layout))
    states = args["hx"] if node.target is LSTM else [args["hx"]]
    with module.graph.inserting_before(node):
        layer = module.graph.get_attr(name)
        result = module.graph.call_function(run_recurrent, (layer, args["input"], *states))
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    # Dead-code elimination keeps ops that may draw random numbers.
    module.graph.erase_node(node)


def iterate_layer_weights(module: GraphModule, node: Node) -> Iterator[Node]:
    """Yield the weights of a recurrent layer, without its biases."""
    for part in fx.get_arguments(node)["params"]:
        value = fx.get_constant(module, part)
        if value is not None and value.ndim > 1:
            yield part
