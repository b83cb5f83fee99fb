"""Capture of a model layer by layer, so that the user's own class still runs.

A decoder of `transformers` keeps its code, with `generate`, its key-value cache and `config`;
dense layers and embeddings are graphs of their own. Layers of equal form are exported once.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.capture import graph_capture
from neural_mp.adaptors.pytorch.capture.call_signature import CallArgs
from neural_mp.adaptors.pytorch.capture.module_capture import watch_calls
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.errors import CaptureError

_PARAMETERS = ("weight", "bias")


def capture_layers(shell: nn.Module, call: CallArgs) -> dict[str, tuple[GraphModule, CallArgs]]:
    """Capture the dense layers and embeddings of a private copy of a model, by path.

    Layers that do not run in this call are left unchanged.

    Raises:
        CaptureError: if no layer runs.
        DataError: if the module does not run on these inputs.
    """
    watched = watch_calls(shell, call, lambda part: _as_layer(part) is not None)
    graphs: dict[Hashable, GraphModule] = {}
    calls: dict[Hashable, CallArgs] = {}
    captured = {}
    for path, module in shell.named_modules():
        layer, recorded = _as_layer(module), watched.get(module)
        if layer is None or recorded is None or not recorded.is_alike or recorded.call.kwargs:
            continue
        key = _form(layer, recorded.call)
        if key not in graphs:
            graphs[key] = graph_capture.capture(layer, recorded.call)
        # One example for equal layers: those of all layers take more memory than a block.
        example = calls.setdefault((key, recorded.call.args[0].shape), recorded.call)
        captured[path] = _with_parameters(graphs[key], layer), example
    if not captured:
        raise CaptureError(
            f"{type(shell).__name__} must run a dense layer or an embedding on the inputs, found "
            f"none; set capture = 'whole' or 'modules'"
        )
    return captured


def _as_layer(module: nn.Module) -> nn.Module | None:
    """Return a module as a dense layer or an embedding; None for any other module."""
    kind = type(module)
    if kind is nn.Linear or (kind is nn.Embedding and module.max_norm is None):
        return module
    return graph_capture.as_linear(module) if graph_capture.is_transposed_dense(module) else None


def _form(layer: nn.Module, call: CallArgs) -> Hashable:
    """Return the properties of a layer that decide on its graph."""
    (tensor,) = call.args
    options = getattr(layer, "padding_idx", None)
    shapes = ((name, value.shape, value.dtype) for name, value in layer.named_parameters())
    return type(layer), options, *shapes, tensor.dtype, tensor.ndim


def _with_parameters(graph: GraphModule, layer: nn.Module) -> GraphModule:
    """Return a copy of the graph of a layer of the same form, with the parameters of `layer`."""
    copied = fx.shallow_copy(graph)
    for name in _PARAMETERS:
        value = getattr(layer, name, None)
        if isinstance(value, torch.Tensor):
            copied.register_parameter(name, value)
    return copied
