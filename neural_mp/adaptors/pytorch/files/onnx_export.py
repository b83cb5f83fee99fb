"""ONNX export of the portable form, with QuantizeLinear/DequantizeLinear pairs.

The few ops without an ONNX translation are decomposed here: torch's exporter would capture the
whole graph once more, which takes up to half of the export, also if no op has to be decomposed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.naming import reserve_name
from neural_mp.adaptors.common.quant_params import MIN_RANGE_WIDTH
from neural_mp.adaptors.pytorch.capture.graph_capture import silence_export_logs, use_export
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph import tracing
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import Sizes
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.errors import ConversionError, MissingFrameworkError
from neural_mp.util.optional_packages import install_command

if TYPE_CHECKING:
    import onnx_ir

#: torch.export's symbol of a dynamic axis: letter and number.
_SYMBOL = re.compile(r"[su]\d+")


def name_axes(model: onnx_ir.Model, sizes: Sizes) -> None:
    """Rename the dynamic axes of an `onnx_ir.Model` in place, in all shapes.

    If the first axes of all inputs share one symbol, its name is `batch`; any other symbol is named
    after its first input and axis number: `input_ids_axis1`. Symbols of axes that are fixed by
    `sizes`, those of the inputs, become numbers.
    """
    names = {**_name_symbols(model.graph.inputs), **_fixed_symbol_sizes(model.graph.inputs, sizes)}
    computed = (value for node in model.graph.all_nodes() for value in node.outputs)
    for value in itertools.chain(model.graph.inputs, computed):
        if value.shape is None:
            continue
        # A shape shared by nodes is frozen, so each value gets a shape of its own.
        value.shape = type(value.shape)([_rename_size(size, names) for size in value.shape])


def _rename_size(size: onnx_ir.SymbolicDim | int, names: Mapping[str, str]) -> Any:
    symbol = getattr(size, "value", None)
    if not isinstance(symbol, str):
        return size
    text = _SYMBOL.sub(lambda match: names.get(match[0], match[0]), symbol)
    return int(text) if text.isdigit() else type(size)(text)


def _name_symbols(inputs: Any) -> Mapping[str, str]:
    axes = [
        (value.name, number, str(size.value))
        for value in inputs
        for number, size in enumerate(value.shape or ())
        if isinstance(getattr(size, "value", None), str)
    ]
    firsts = {symbol for _, number, symbol in axes if number == 0}
    names = {symbol: "batch" for symbol in firsts if len(firsts) == 1}
    for name, number, symbol in axes:
        names.setdefault(symbol, re.sub(r"\W", "_", f"{name}_axis{number}"))
    return names


def _fixed_symbol_sizes(inputs: Any, sizes: Sizes) -> dict[str, str]:
    """Return symbol → the size of an axis that has no other."""
    shapes = [value.shape or () for value in inputs]
    tensor_sizes = [axes for axes in sizes if isinstance(axes, tuple)]
    if len(shapes) != len(tensor_sizes):
        return {}
    return {
        size.value: str(axis.least)
        for shape, axes in zip(shapes, tensor_sizes, strict=True)
        for size, axis in zip(shape, axes, strict=False)
        if isinstance(getattr(size, "value", None), str) and axis.least == axis.largest
    }


#: First opset in which convolutions accept bfloat16.
OPSET = 22


def export_onnx(
    model: TorchModel, path: Path, metadata: Mapping[str, str], *, in_one_file: bool = True
) -> None:
    """Write a model as `.onnx`, with the names of ops and axes and `metadata` in its properties.

    If not `in_one_file`, the weights are in a file beside: they are written tensor by tensor, and
    runtimes map them, where a message of all weights is copied several times.

    Raises:
        MissingFrameworkError: if onnx or onnxscript is not installed.
        ConversionError: if an op has no ONNX counterpart, or the file cannot be written.
    """
    if model.shell is not None:
        raise ConversionError(
            "ONNX export requires a single graph, which a model converted module by module does "
            "not have"
        )
    table = _make_qdq_translations()
    names = list_output_names(model.portable_graph)
    try:
        module = make_translatable(model.portable_graph)
        program, sizes = use_export(
            module,
            model.example,
            lambda exported, sizes: (_translate_program(exported, table, names), sizes),
        )
        name_nodes(program.model, module)
        name_axes(program.model, sizes)
        program.model.metadata_props.update(metadata)
        program.save(str(path), external_data=not in_one_file)
    except Exception as error:
        # The exporter has one type for untranslatable ops; internal errors are of any type.
        text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()
        lines = text.splitlines() or ["unknown reason"]
        raise ConversionError(
            f"the model cannot be written as {str(path)!r}: {type(error).__name__}: {lines[0]}"
        ) from error


def _translate_program(
    exported: ExportedProgram,
    table: dict[Callable[..., Any], Callable[..., Any]],
    names: Sequence[str],
) -> torch.onnx.ONNXProgram:
    with silence_export_logs():
        program = torch.onnx.export(
            decomposed_if_needed(exported),
            dynamo=True,
            custom_translation_table=table,
            opset_version=OPSET,
            output_names=names,
            verbose=False,
        )
    assert program is not None
    return program


def name_nodes(model: onnx_ir.Model, module: GraphModule) -> None:
    """Rename the nodes of an `onnx_ir.Model` in place after the ops that they come from.

    The last node of an op has the name of the op; the nodes before it append their type: `act` and
    `act/Sigmoid`. Nodes of no known op keep their names.
    """
    ops = {node.name: node.meta[fx.OP_NAME] for node in fx.map_op_nodes(module).values()}
    nodes = list(model.graph)
    origins = [_find_source_op(node.meta.get("node"), ops, id(module.graph)) for node in nodes]
    last = {op: index for index, op in enumerate(origins)}
    reserved: set[str] = {node.name or "" for node in nodes}
    for index, (node, op) in enumerate(zip(nodes, origins, strict=True)):
        if op is not None:
            is_last = last[op] == index
            node.name = reserve_name(op if is_last else f"{op}/{node.op_type}", reserved)


def _find_source_op(node: object, ops: Mapping[str, str], graph: int) -> str | None:
    """Return the op that a node of the exported program comes from; None if unknown."""
    waiting = list(getattr(node, "meta", {}).get("from_node") or ())
    while waiting:
        source = waiting.pop()
        if getattr(source, "graph_id", None) == graph:
            return ops.get(source.name)
        waiting += getattr(source, "from_node", None) or ()
    return None


def list_output_names(module: GraphModule) -> list[str]:
    """Return the output names: the keys if the model returns a dict."""
    spec = module.graph._codegen.pytree_info.out_spec
    assert spec is not None
    counted = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    paths, _ = pytree.tree_flatten_with_path(counted)
    names = [".".join(re.findall(r"\w+", pytree.keystr(keys))) for keys, _ in paths]
    return [f"output_{name}" if name.isdigit() else name or "output" for name in names]


def _make_qdq_translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return QDQ op → its ONNX translation; onnxscript compiles the functions from source."""
    try:
        import onnx
        from onnxscript import opset22
    except ImportError as error:
        raise MissingFrameworkError(
            f"ONNX export requires {error.name}; install it with: {install_command('onnx')}"
        ) from None

    op: Any = opset22

    def make_uint8_constant(value: int) -> Any:
        return op.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.UINT8, [], [value]))

    def make_uint32_constant(value: int) -> Any:
        return op.Constant(value=onnx.helper.make_tensor("", onnx.TensorProto.UINT32, [], [value]))

    def quantize(x, scale: float, zero_point: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        x = op.Cast(x, to=onnx.TensorProto.FLOAT)  # x may be 16-bit, the scale is float32
        return op.QuantizeLinear(x, op.Constant(value_float=scale), make_uint8_constant(zero_point))

    def dequantize(q, scale: float, zero_point: int, dtype: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        real = op.DequantizeLinear(
            q, op.Constant(value_float=scale), make_uint8_constant(zero_point)
        )
        return real if dtype == onnx.TensorProto.FLOAT else op.Cast(real, to=dtype)

    def dequantize_weight(q, scales):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        return op.DequantizeLinear(q, scales, axis=0)

    def dequantize_grouped(q, scales, offsets, bits: int = 4):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        last = op.Constant(value_ints=[-1])
        packed, width = q, 8
        if bits == 3:  # three bytes hold eight codes
            rows = op.Concat(op.Shape(q, start=0, end=1), op.Constant(value_ints=[-1, 3]), axis=0)
            triples = op.Reshape(op.Cast(q, to=onnx.TensorProto.INT32), rows)
            factors = op.Cast(
                op.Constant(value_ints=[1 << 16, 1 << 8, 1]), to=onnx.TensorProto.INT32
            )
            packed, width = op.ReduceSum(op.Mul(triples, factors), last, keepdims=0), 24
        packed = op.Cast(packed, to=onnx.TensorProto.UINT32)
        parts = [
            op.Unsqueeze(
                op.BitwiseAnd(
                    op.BitShift(packed, make_uint32_constant(shift), direction="RIGHT"),
                    make_uint32_constant(2**bits - 1),
                ),
                last,
            )
            for shift in range(width - bits, -1, -bits)
        ]
        groups = op.Concat(op.Shape(scales), last, axis=0)
        codes = op.Cast(op.Reshape(op.Concat(*parts, axis=-1), groups), to=onnx.TensorProto.FLOAT)
        # Scales and offsets are bfloat16.
        scales = op.Unsqueeze(op.Cast(scales, to=onnx.TensorProto.FLOAT), last)
        offsets = op.Unsqueeze(op.Cast(offsets, to=onnx.TensorProto.FLOAT), last)
        steps = op.Mul(op.Sub(codes, op.Constant(value_float=2.0 ** (bits - 1))), scales)
        rows = op.Concat(op.Shape(q, start=0, end=1), last, axis=0)
        return op.Reshape(op.Add(steps, offsets), rows)

    def quantize_dynamic(x):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        # DynamicQuantizeLinear has one range for all rows.
        wide, last = op.Cast(x, to=onnx.TensorProto.FLOAT), op.Constant(value_ints=[-1])
        none, most = op.Constant(value_float=0.0), op.Constant(value_float=float(ops.QMAX))
        low = op.Min(op.ReduceMin(wide, last, keepdims=1), none)
        width = op.Sub(op.Max(op.ReduceMax(wide, last, keepdims=1), none), low)
        is_wide = op.Greater(width, op.Constant(value_float=MIN_RANGE_WIDTH))
        scale = op.Where(is_wide, op.Div(width, most), op.Constant(value_float=1.0))
        zero_point = op.Clip(op.Round(op.Neg(op.Div(low, scale))), none, most)
        steps = op.Add(op.Div(wide, scale), op.Add(zero_point, op.Constant(value_float=0.5)))
        integers = op.Cast(op.Clip(op.Floor(steps), none, most), to=onnx.TensorProto.UINT8)
        return integers, scale, zero_point

    def dequantize_dynamic(q, scale, zero_point, dtype: int):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        real = op.Mul(op.Sub(op.Cast(q, to=onnx.TensorProto.FLOAT), zero_point), scale)
        return real if dtype == onnx.TensorProto.FLOAT else op.Cast(real, to=dtype)

    return {
        ops.quantize: quantize,
        ops.dequantize: dequantize,
        ops.dequantize_weight: dequantize_weight,
        ops.dequantize_grouped: dequantize_grouped,
        ops.quantize_dynamic: quantize_dynamic,
        ops.dequantize_dynamic: dequantize_dynamic,
    }


_aten = torch.ops.aten
#: Op, its positional arguments → the equal op that has a translation, its arguments; None if the
#: exporter has to decompose the op.
_Rewrite = Callable[..., tuple[Any, tuple[Any, ...]] | None]


def _transposed_conv_rewrite(axes: int) -> _Rewrite:
    def to_convolution(
        x: Node,
        weight: Node,
        bias: Node | None = None,
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
        arguments = (x, weight, bias, steps, pads, spread, True, more, groups)
        return _aten.convolution.default, arguments

    return to_convolution


_REWRITES: Mapping[Any, _Rewrite] = {
    _aten.__and__.Tensor: lambda lhs, rhs: (_aten.bitwise_and.Tensor, (lhs, rhs)),
    _aten.adaptive_avg_pool2d.default: lambda x, size: (
        (_aten.mean.dim, (x, [-1, -2], True)) if list(size) == [1, 1] else None
    ),
    _aten.conv_transpose1d.default: _transposed_conv_rewrite(1),
    _aten.conv_transpose2d.input: _transposed_conv_rewrite(2),
    _aten.conv_transpose3d.input: _transposed_conv_rewrite(3),
}


def make_translatable(module: GraphModule) -> GraphModule:
    """Return a copy of a graph in which ops without an ONNX translation are replaced by equal ones.

    Ops that this module does not know remain.
    """
    copied = fx.copy_graph_shallowly(module)
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
        modules = program.graph_module.modules()
        graphs = (module.graph for module in modules if isinstance(module, GraphModule))
        if not table or any(_is_decomposed(n, table) for graph in graphs for n in graph.nodes):
            with tracing.limit_symbolic_time(program.graph_module):
                return decompose(decomp_table, *more, **options)
        return program

    vars(program)["run_decompositions"] = run_decompositions
    return program


def _is_decomposed(node: Node, table: Container[Any]) -> bool:
    """Whether a decomposition changes a node: it has an entry, or writes to its arguments."""
    schema = getattr(node.target, "_schema", None)
    return node.op == "call_function" and (
        node.target in table or (schema is not None and schema.is_mutable)
    )
