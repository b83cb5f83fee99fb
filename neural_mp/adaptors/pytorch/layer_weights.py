"""Weights and biases of layers: values to scale, Hessian traces and gradients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.optional import Direction
from neural_mp.adaptors.common.sensitivity import Squares, estimate_summed_traces
from neural_mp.adaptors.common.weights.cross_layer_scaling import (
    Array,
    LayerParams,
    LayerRescale,
    Window,
)
from neural_mp.adaptors.pytorch.capture.module_capture import visit_nodes
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import (
    CONVOLUTIONS,
    WEIGHTED,
    convolution_geometry,
    has_integer_kernel,
)
from neural_mp.adaptors.pytorch.kernels.lowering import rewrite_graphs
from neural_mp.util.pytree import convert_to_numpy


def estimate_hessian_traces(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, float]:
    """Return op → trace of the Hessian with respect to its weight."""
    run, leaves = _make_differentiable_model(model)
    weights = {name: node for name, (_, node) in _map_weight_nodes(model).items() if name in ops}

    def differentiate_batch(inputs: object) -> tuple[list[torch.Size], Squares]:
        results = pytree.tree_leaves(run(model.call(inputs)))
        outputs = [y for y in results if getattr(y, "requires_grad", False)]
        parameters = {name: leaves[node] for name, node in weights.items() if node in leaves}

        def compute_squared_gradients(signs: list[Array]) -> dict[str, float]:
            gradients = _directional_gradients(
                outputs, parameters, signs, retain_graph=True
            ).items()
            return {name: float(gradient.square().sum()) for name, gradient in gradients}

        return [y.shape for y in outputs], compute_squared_gradients

    return estimate_summed_traces(weights, map(differentiate_batch, batches))


def _directional_gradients(
    outputs: list[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    directions: Sequence[Array],
    retain_graph: bool = False,
) -> dict[str, torch.Tensor]:
    """Return name → gradient along `directions`, for the parameters that outputs depend on."""
    along = [torch.from_numpy(v).to(y.dtype) for v, y in zip(directions, outputs, strict=True)]
    gradients = torch.autograd.grad(
        outputs, list(parameters.values()), along, retain_graph=retain_graph, allow_unused=True
    )
    pairs = zip(parameters, gradients, strict=True)
    return {name: gradient for name, gradient in pairs if gradient is not None}


class _WeightsInFloat32(Mapping[str, Array]):
    """Weights by op; those in 16 bits are converted whenever one is read.

    All of them in float32 at once would take more memory than the model.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, op: str) -> Array:
        return convert_to_numpy(self._tensors[op]).astype(np.float32, copy=False)

    def __contains__(self, op: object) -> bool:
        return op in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def constant_weights(model: TorchModel) -> Mapping[str, Array]:
    """Return op → its constant weight, for dense layers and tables."""
    constants = {}
    for name, (module, node) in _map_weight_nodes(model).items():
        value = fx.get_constant(module, node)
        if value is not None and value.ndim == 2:
            constants[name] = value
    return _WeightsInFloat32(constants)


def compute_weight_gradients(
    model: TorchModel, inputs: object, ops: Collection[str], direction: Direction
) -> dict[str, Array]:
    """Return op → gradient of the outputs along a direction, by the op's weight."""
    run, leaves = _make_differentiable_model(model)
    returned = run(model.call(inputs))
    named = returned if isinstance(returned, Mapping) else {}
    results = [named["logits"]] if "logits" in named else pytree.tree_leaves(returned)
    outputs = [y for y in results if getattr(y, "requires_grad", False)]
    if not outputs:
        return {}
    along = direction([convert_to_numpy(y.detach().float()) for y in outputs], "logits" in named)
    nodes = {name: node for name, (_, node) in _map_weight_nodes(model).items() if name in ops}
    parameters = {name: leaves[node] for name, node in nodes.items() if node in leaves}
    gradients = _directional_gradients(outputs, parameters, along).items()
    return {name: convert_to_numpy(gradient.float()) for name, gradient in gradients}


def _make_differentiable_model(
    model: TorchModel,
) -> tuple[Callable[[CallArgs], Any], dict[Node, torch.Tensor]]:
    """Return the model as a function of its call, and constant → leaf, filled by calls."""
    leaves: dict[Node, torch.Tensor] = {}

    def run_with_leaves(node: Node, run: Callable[[], Any]) -> Any:
        # Stays on for user code after this graph, until the caller's `no_grad` exits.
        torch.set_grad_enabled(True)
        result = run()
        if node.op != "get_attr" or not fx.is_float(result):
            return result
        # One leaf for all calls of a module.
        if node not in leaves:
            leaves[node] = result.detach().requires_grad_()
        return leaves[node]

    return visit_nodes(model, run_with_leaves, portable=True), leaves


def _map_weight_nodes(model: TorchModel) -> dict[str, tuple[GraphModule, Node]]:
    """Return op → the graph of the op and the node of its weight."""
    return {
        name: (part.portable, fx.get_arguments(node)["weight"])
        for part in model.parts.values()
        for name, node in fx.map_op_nodes(part.portable).items()
        if node.target in WEIGHTED
    }


_LAYER_NORM = torch.ops.aten.layer_norm.default


def collect_layer_params(model: TorchModel) -> dict[str, LayerParams]:
    """Return op → its weight and bias."""
    return {
        name: layer
        for part in model.parts.values()
        for name, node in fx.map_op_nodes(part.portable).items()
        if (layer := _read_layer_params(part.portable, name, node)) is not None
    }


def _read_layer_params(module: GraphModule, name: str, node: Node) -> LayerParams | None:
    has_kernel = has_integer_kernel(module, node)
    if not has_kernel and node.target is not _LAYER_NORM:
        return None
    args = fx.get_arguments(node)
    weight = fx.get_constant(module, args["weight"])
    if weight is None or (
        args["bias"] is not None and fx.get_constant(module, args["bias"]) is None
    ):
        return None

    def read_weight() -> Array:
        return convert_to_numpy(weight)

    if has_kernel:
        axes = CONVOLUTIONS.get(node.target, 0)
        if not axes:
            return LayerParams(name, read_weight, 0, 1)
        stride, padding, dilation, groups = convolution_geometry(node)
        window = Window(tuple(stride), tuple(dilation), tuple((pad, pad) for pad in padding))
        # Pooling is assumed over two axes; a 1-D convolution leaves the first unpooled.
        return LayerParams(name, read_weight, 0, 1, groups, -1 - axes, axes > 1, window)
    return LayerParams(name, read_weight) if len(args["normalized_shape"]) == 1 else None


def with_layer_params(model: TorchModel, changes: Mapping[str, LayerRescale]) -> TorchModel:
    """Return the model with changed weights and biases in some layers."""

    def rescale_layers(module: GraphModule) -> None:
        for name, node in fx.map_op_nodes(module).items():
            if name in changes:
                _rescale_layer(module, name, node, changes[name])

    return rewrite_graphs(model, rescale_layers)


def _rescale_layer(module: GraphModule, name: str, node: Node, change: LayerRescale) -> None:
    layer, bias = (
        _read_layer_params(module, name, node),
        fx.get_constant(module, fx.get_arguments(node)["bias"]),
    )
    assert layer is not None
    fx.put_constant(module, node, "weight", change.rescale_weight(layer))
    if bias is not None or change.shift is not None:
        channels = np.shape(layer.weight())[layer.outputs]
        values = change.rescale_bias(None if bias is None else convert_to_numpy(bias), channels)
        fx.put_constant(module, node, "bias", values)
