"""Modules in the place of dense layers and tables, with the attributes of these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR, WEIGHTED
from neural_mp.errors import ConversionError

_Replacement = TypeVar("_Replacement", bound="StandIn")


class StoredWeight(torch.Tensor):
    """A weight whose values are computed when an op reads them.

    Shape, dtype and device cost nothing; code of `transformers` reads these in every run.
    """

    _read: Callable[[], torch.Tensor]

    def __repr__(self, *_: object, **__: object) -> str:
        return f"StoredWeight({list(self.shape)}, {self.dtype})"

    def __deepcopy__(self, _: dict[int, Any]) -> torch.Tensor:
        return self._read()

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: object, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an op on the values.

        Raises:
            ConversionError: the op changes the weight.
        """
        if func is torch.ops.aten.detach.default:
            return _store_weight(args[0], args[0]._read)
        operands = pytree.tree_map_only(StoredWeight, lambda w: w._read(), (args, kwargs or {}))
        result = func(*operands[0], **operands[1])
        if func._schema.is_mutable and isinstance(args[0], StoredWeight):
            if not torch.equal(operands[0][0], args[0]._read()):
                raise ConversionError(
                    f"the weight of a converted layer must not change, but the model's code "
                    f"runs {func} on a weight; exclude the layer from the conversion"
                )
            return args[0]
        return result


def _store_weight(like: torch.Tensor, read: Callable[[], torch.Tensor]) -> StoredWeight:
    """Return a weight of the shape and dtype of another, with the values that `read` returns."""
    weight: Any = torch.Tensor._make_wrapper_subclass(StoredWeight, like.shape, dtype=like.dtype)
    weight._read = read
    stored: StoredWeight = weight
    return stored


class StandIn(nn.Module):
    """A module that replaces another one in the user's code.

    After `stand_for`, attributes that a dense layer or a table has, such as `weight` and
    `in_features`, are those of the layer.
    """

    _layer: nn.Module | None = None
    _graph: GraphModule | None = None

    def stand_for(self: _Replacement, layer: nn.Module, graph: GraphModule | None) -> _Replacement:
        """Answer for the attributes of a layer, and return this module.

        Args:
            layer: the layer.
            graph: the graph that holds the weights; None if the layer does.
        """
        # Neither is a submodule: the weights would count twice.
        object.__setattr__(self, "_layer", layer)
        object.__setattr__(self, "_graph", graph)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            layer = self._layer
            if layer is None or name.startswith("_"):
                raise
            value = getattr(layer, name)
            if isinstance(value, nn.Module) or callable(value):
                raise
        graph = self._graph
        if graph is None or not isinstance(value, nn.Parameter):
            return value
        return _store_weight(value, lambda: read_layer_values(layer, graph, name))


class GraphStandIn(StandIn):
    """A graph in the place of a layer."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__()
        self.graph_module = graph

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Run the graph."""
        return self.graph_module(*args, **kwargs)


def is_transposed_dense(module: nn.Module) -> bool:
    """Whether a module is a `Conv1D` of transformers: dense, with the weight [inputs, outputs]."""
    kind = type(module)
    return f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"


def is_table(module: nn.Module) -> bool:
    """Whether a module is an embedding, or one of transformers that e.g. scales the rows."""
    kind = type(module)
    in_transformers = kind.__module__.startswith("transformers.")
    names = {name for name, _ in module.named_parameters()}
    return kind is nn.Embedding or (
        isinstance(module, nn.Embedding) and in_transformers and names == {"weight"}
    )


def read_layer_values(layer: nn.Module, graph: GraphModule, name: str) -> torch.Tensor:
    """Return the `weight` or the `bias` of a layer as its graph computes, in the layer's form.

    Raises:
        ConversionError: the graph has no such layer.
    """
    node = next((node for node in graph.graph.nodes if node.target in WEIGHTED), None)
    source = None if node is None else fx.get_arguments(node).get(name)
    if node is None or source is None:
        raise ConversionError(
            f"{name} of a converted module must belong to a dense layer or a table, got a graph "
            f"without any; read the attribute of the original model"
        )
    values = _evaluate(graph, source)
    if name == "weight" and node.target is LINEAR:
        factors = _find_input_factors(graph, node)
        values = values if factors is None else values * factors.to(values.dtype)
        values = values.t() if is_transposed_dense(layer) else values
    return values.to(getattr(layer, name).dtype)


def _find_input_factors(graph: GraphModule, layer: Node) -> torch.Tensor | None:
    """Return the constant that a graph multiplies the inputs of a layer by, if any."""
    source = layer.args[0]
    while isinstance(source, Node) and source.op == "call_function":
        if source.target is torch.ops.aten.mul.Tensor:
            return fx.get_constant(graph, source.args[1])
        source = source.args[0] if source.args else None
    return None


def _evaluate(graph: GraphModule, node: Node) -> torch.Tensor:
    """Return the value of a node that depends on constants only."""
    constant = fx.get_constant(graph, node)
    if constant is not None:
        return constant
    run: Any = node.target
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _evaluate(graph, n))
    with torch.no_grad():
        result: torch.Tensor = run(*args, **kwargs)
    return result
