"""Decomposition of the few ops without an ONNX translation, without capturing the graph again.

torch's exporter decomposes a program by capturing the whole graph once more, which takes up to half
of the export, also if no op has to be decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.graph import graph_edit as fx

_aten = torch.ops.aten
#: Op, its positional arguments → the equal op that has a translation, its arguments; None if the
#: exporter has to decompose the op.
_Rewrite = Callable[..., tuple[Any, tuple[Any, ...]] | None]


def _both(lhs: Any, rhs: Any) -> tuple[Any, tuple[Any, ...]]:
    return _aten.bitwise_and.Tensor, (lhs, rhs)


def _mean_of_images(x: Any, size: Any) -> tuple[Any, tuple[Any, ...]] | None:
    return (_aten.mean.dim, (x, [-1, -2], True)) if list(size) == [1, 1] else None


def _transposed(axes: int) -> _Rewrite:
    def rewrite(
        x: Any,
        weight: Any,
        bias: Any = None,
        stride: Sequence[int] = (1,),
        padding: Sequence[int] = (0,),
        output_padding: Sequence[int] = (0,),
        groups: int = 1,
        dilation: Sequence[int] = (1,),
    ) -> tuple[Any, tuple[Any, ...]]:
        steps, pads, more, spread = (
            list(sizes) * axes if len(sizes) == 1 else list(sizes)
            for sizes in (stride, padding, output_padding, dilation)
        )
        return _aten.convolution.default, (
            x,
            weight,
            bias,
            steps,
            pads,
            spread,
            True,
            more,
            groups,
        )

    return rewrite


_REWRITES: Mapping[Any, _Rewrite] = {
    _aten.__and__.Tensor: _both,
    _aten.adaptive_avg_pool2d.default: _mean_of_images,
    _aten.conv_transpose1d.default: _transposed(1),
    _aten.conv_transpose2d.input: _transposed(2),
    _aten.conv_transpose3d.input: _transposed(3),
}


def translatable(module: GraphModule) -> GraphModule:
    """Return a copy of a graph in which ops without an ONNX translation are replaced by equal ones.

    Ops that this module does not know remain.
    """
    copied = fx.shallow_copy(module)
    for node in copied.graph.nodes:
        rewrite = _REWRITES.get(node.target)
        if rewrite is None or node.kwargs:
            continue
        replacement = rewrite(*node.args)
        if replacement is not None:
            node.target, node.args = replacement
    copied.recompile()
    return copied


def decomposed_if_needed(program: ExportedProgram) -> ExportedProgram:
    """Make `run_decompositions` return the program itself if it would not change any op."""
    decompose = program.run_decompositions

    def run_decompositions(
        decomp_table: dict[Any, Callable[..., Any]] | None = None, *more: Any, **options: Any
    ) -> ExportedProgram:
        table = decomp_table or {}
        if not table or any(op in table or _writes(op) for op in _ops(program)):
            return decompose(decomp_table, *more, **options)
        return program

    vars(program)["run_decompositions"] = run_decompositions
    return program


def _ops(program: ExportedProgram) -> set[Any]:
    modules = program.graph_module.modules()
    graphs = (module.graph for module in modules if isinstance(module, GraphModule))
    return {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}


def _writes(op: Any) -> bool:
    schema = getattr(op, "_schema", None)
    return schema is not None and schema.is_mutable
