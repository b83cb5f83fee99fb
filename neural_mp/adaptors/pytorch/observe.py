"""Observation of models run node by node: tensor statistics, op outputs, origin of NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.calibration import BatchStats, summarized
from neural_mp.adaptors.common.op_outputs import OpOutput, read_op_value
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.pytorch.capture.canonicalize import build_graph
from neural_mp.adaptors.pytorch.capture.in_place_updates import IN_PLACE
from neural_mp.adaptors.pytorch.capture.module_capture import mark_accepted, visit_nodes
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.core.graph import OpGraph
from neural_mp.util.pytree import Array, convert_to_numpy

T = TypeVar("T")


def build_observable_graph(model: TorchModel) -> OpGraph:
    """Return the ops whose outputs a run can return; see `OpOutputs`."""
    names = {
        location[0]
        for part in model.parts.values()
        for node in part.runnable.graph.nodes
        if (location := _find_observed_op(node)) is not None
    }
    graph = build_graph(model)
    return graph.with_only({op.name: op for op in graph if op.name in names})


def make_op_outputs(
    model: TorchModel, ops: Collection[str]
) -> Callable[[Any], dict[str, OpOutput]]:
    """Return a function that runs one batch and returns the outputs of some ops.

    For an op that runs several times per run, the first result is returned.
    """
    requested, outputs = frozenset(ops), dict[str, OpOutput]()

    def record_output(node: Node, run: Callable[[], Any]) -> Any:
        result, location = run(), _find_observed_op(node)
        if location is None or location[0] not in requested or location[0] in outputs:
            return result
        value = _to_op_output(result, location[1]) if isinstance(result, torch.Tensor) else None
        if value is not None:
            outputs[location[0]] = value
        return result

    run = visit_nodes(model, record_output)

    def run_batch(inputs: object) -> dict[str, OpOutput]:
        outputs.clear()
        run(model.call(inputs))
        return dict(outputs)

    return run_batch


def _find_observed_op(node: Node) -> tuple[str, QuantParams | None] | None:
    """Return the op whose result a node computes, and quantization parameters if uint8."""
    if node.op != "call_function":
        return None
    if fx.RESULT in node.meta:
        name, encoding = node.meta[fx.RESULT]
        return name, encoding
    return (node.meta[fx.OP_NAME], None) if fx.OP_NAME in node.meta else None


def _to_op_output(result: torch.Tensor, encoding: QuantParams | None) -> OpOutput | None:
    if encoding is not None:
        return read_op_value(result.numpy(), encoding)
    if not result.is_floating_point() or not result.numel():
        return None
    # Copy: a later kernel may overwrite the memory.
    real = result.detach().to(torch.float32, copy=True)
    return OpOutput(real.numpy(), str(result.dtype).removeprefix("torch."))


#: Convolution with a packed weight; None if torch is built without oneDNN.
_PACKED: Any = (
    torch.ops.mkldnn._convolution_pointwise.default
    if torch.backends.mkldnn.is_available()
    else None
)
#: Ops whose result is freshly allocated memory.
_FRESH = layers.INTEGER_LAYERS.union((_PACKED,), IN_PLACE, IN_PLACE.values())


def make_calibration_graph(model: TorchModel) -> TorchModel:
    """Return a model whose portable graphs run with less time and memory, one run at a time.

    Convolution weights are packed once instead of in every run, and results overwrite operands
    without other readers. Values must be read before the next op runs.
    """
    parts = {
        path: replace(part, portable=_accelerate_graph(part.portable))
        for path, part in model.parts.items()
    }
    return replace(model, parts=parts)


def _accelerate_graph(module: GraphModule) -> GraphModule:
    module = fx.copy_graph_shallowly(module)
    for node in list(module.graph.nodes):
        if node.target is layers.CONVOLUTION:
            _pack_convolution(module, node)
        elif node.target in IN_PLACE:
            _save_memory(node)
    module.recompile()
    return module


def _pack_convolution(module: GraphModule, layer: Node) -> None:
    args = fx.get_arguments(layer)
    weight, image = fx.get_constant(module, args["weight"]), args["input"].meta.get("val")
    if weight is None or not fx.is_float(image) or image.ndim != weight.ndim:
        return
    if _PACKED is None or {weight.dtype, image.dtype} != {torch.float32}:
        return
    stride, padding, dilation, groups = layers.convolution_geometry(layer)
    order = (padding, stride, dilation, groups)
    likely = [fx.get_likely_size(size) for size in image.shape]
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *order, likely)
    constant = fx.add_constant(module, f"{layer.name}_packed", packed, layer)
    layer.target = _PACKED
    layer.args = (args["input"], constant, args["bias"], *order, "none", [], "")
    layer.kwargs = {}


def _save_memory(node: Node) -> None:
    if node.target is layers.ADD and not node.kwargs and not _may_overwrite(node.args[0], node):
        node.args = (node.args[1], node.args[0])
    if _may_overwrite(node.args[0], node):
        node.target = IN_PLACE[node.target]


def _may_overwrite(operand: object, node: Node) -> bool:
    """Whether a node is the only reader of an operand and fits its result into the memory."""
    if not isinstance(operand, Node) or operand.target not in _FRESH:
        return False
    exclusive = len(operand.users) == 1 and node.args.count(operand) == 1
    old, new = operand.meta.get("val"), node.meta.get("val")
    if not exclusive or not fx.is_float(old) or not fx.is_float(new) or old.dtype != new.dtype:
        return False
    return fx.sizes_of_result(operand) == fx.sizes_of_result(node)


def observe_tensors(
    model: TorchModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, BatchStats]]:
    """Yield tensor name and summary of values, for the named tensors in every batch."""
    return _watch_tensors(
        model,
        batches,
        tensors,
        lambda values, node: summarized(values, _find_channel_axis(node, values.ndim)),
    )


def observe_values(
    model: TorchModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Yield tensor name and values, for the named tensors in every batch."""
    # A copy: the next op may overwrite the memory.
    return _watch_tensors(model, batches, tensors, lambda values, node: values.copy())


def _watch_tensors(
    model: TorchModel,
    batches: Iterable[Any],
    tensors: Collection[str],
    reduced: Callable[[Array, Node], T | None],
) -> Iterator[tuple[str, T]]:
    records: list[tuple[str, T]] = []
    nodes = (node for part in model.parts.values() for node in part.portable.graph.nodes)
    computed = (node for node in nodes if node.op in ("placeholder", "call_function"))
    requested = {
        fx.get_tensor_name(node): node for node in computed if fx.get_tensor_name(node) in tensors
    }

    def record_tensor(node: Node, run: Callable[[], Any]) -> Any:
        result, name = run(), fx.get_tensor_name(node)
        if node.op != "get_attr" and name in requested and fx.is_float(result):
            # Immediately: the next op may overwrite the memory.
            record = reduced(convert_to_numpy(result.float()), requested[name])
            records.extend([(name, record)] if record is not None else [])
        return result

    run = visit_nodes(make_calibration_graph(model), record_tensor, portable=True)
    for inputs in batches:
        call = model.call(inputs)
        run(call)
        mark_accepted(model, call)
        yield from records
        records.clear()


def infer_element_counts(
    model: TorchModel, inputs: object, tensors: Collection[str]
) -> dict[str, float] | None:
    """Return tensor → its number of elements for a batch, from the sizes known at capture.

    None if a size depends on values, or the model has no single graph.
    """
    if model.shell is not None:
        return None
    nodes, counts = model.portable_graph.graph.nodes, dict[str, float]()
    symbols = _sizes_of_symbols(nodes, model.call(inputs).flatten_leaves())
    # Most results of a model share a few sizes, and each substitution takes half a millisecond.
    size_of = cache(partial(_resolve_size, known=symbols))
    for node in nodes:
        name, value = fx.get_tensor_name(node), node.meta.get("val")
        if node.op not in ("placeholder", "call_function") or name not in tensors:
            continue
        if value is None:
            return None
        if fx.is_float(value):
            count = math.prod(map(size_of, fx.sizes_of_result(node)))
            if math.isnan(count):
                return None
            counts[name] = counts.get(name, 0.0) + float(count)
    return {name: count for name, count in counts.items() if count}


def _sizes_of_symbols(nodes: Iterable[Node], leaves: Iterable[Any]) -> dict[Any, int]:
    bindings: dict[Any, int] = {}
    for node, leaf in zip((n for n in nodes if n.op == "placeholder"), leaves, strict=False):
        if isinstance(node.meta.get("val"), torch.Tensor) and isinstance(leaf, torch.Tensor):
            sizes = zip(fx.sizes_of_result(node), leaf.shape, strict=True)
            bindings.update({size: now for size, now in sizes if getattr(size, "is_Symbol", False)})
    return bindings


def _resolve_size(size: Any, known: Mapping[Any, int]) -> float:
    """Return a size as a number; NaN if the symbols in it are not all known."""
    if isinstance(size, int):
        return size
    value = size.subs(known)
    return int(value) if value.is_Integer else math.nan


def _find_channel_axis(node: Node, axes: int) -> int:
    """Return the channel axis of a result: as read by a layer, else by signature."""
    for reader in node.users:
        if reader.target in layers.INTEGER_LAYERS and reader.args[0] is node:
            return axes - 1 - layers.CONVOLUTIONS.get(reader.target, 0)
    return 1 if axes >= 4 else axes - 1


def find_non_finite(model: TorchModel, inputs: object) -> str | None:
    """Return the first op whose result holds NaN or Inf; None if there is none."""
    names: list[str] = []

    def record_non_finite(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if fx.OP_NAME in node.meta:
            floats = filter(fx.is_float, pytree.tree_leaves(result))
            if any(not torch.isfinite(leaf).all() for leaf in floats):
                names.append(str(node.meta[fx.OP_NAME]))
        return result

    visit_nodes(model, record_non_finite)(model.call(inputs))
    return names[0] if names else None
