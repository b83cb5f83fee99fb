"""Transfer of captured models to other runtimes as ONNX files."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.signatures.boundary import (
    DICT,
    LIST,
    NAMED,
    TUPLE,
    Boundary,
    Containers,
)
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.pytorch.files.onnx_export import export_onnx
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.output_classes import value_names
from neural_mp.adaptors.pytorch.kernels.direct_calls import keeps_state
from neural_mp.adaptors.pytorch.versions import list_child_specs
from neural_mp.errors import ConversionError

_SEQUENCES = {tuple: TUPLE, list: LIST}
#: Module of the hooks that `transformers` installs at the first call: they record the outputs
#: that a call requests, and change nothing.
_RECORDER = "transformers.utils.output_capturing"
_STAYS = "the model stays in PyTorch"


def write_onnx(model: TorchModel, folder: Path) -> Path:
    """Write a model as an ONNX file in a folder, the weights in another; return the first."""
    path = folder / "model.onnx"
    export_onnx(model, path, {}, in_one_file=False)
    return path


def to_tensor(array: NDArray[Any]) -> torch.Tensor:
    """Return an array as a tensor."""
    # Equal to `as_tensor` for arrays, in a third of the time.
    return torch.from_numpy(array) if type(array) is np.ndarray else torch.as_tensor(array)


def model_boundary(model: TorchModel) -> Boundary:
    """Return the calls of a model, with tensors by their position in the ONNX file.

    Raises:
        ConversionError: the model trains, has hooks or state, or is called with other values than
            tensors.
    """
    if model.shell is not None:
        raise ConversionError(f"{_STAYS}: it has no single graph, and is converted by modules")
    if model.original is not None:
        _require_plain(model, model.original)
    output = next(node for node in model.portable_graph.graph.nodes if node.op == "output")
    leaves = pytree.tree_leaves(output.args)
    spec = model.portable_graph.graph._codegen.pytree_info.out_spec
    assert spec is not None
    count = sum(leaf is not None for leaf in leaves)
    outputs = tuple(_build_spec(f"output_{index}", index) for index in range(count))
    return Boundary(
        "pytorch",
        Signature(_list_input_specs(model), outputs),
        _build_output_containers(spec, leaves, [0]),
    )


def _require_plain(model: TorchModel, module: nn.Module) -> None:
    if module.training:
        raise ConversionError(f"{_STAYS}: it is in training mode; call eval() on it")
    for name, part in module.named_modules():
        hooks = (*part._forward_hooks.values(), *part._forward_pre_hooks.values())
        if any(getattr(hook, "__module__", "") != _RECORDER for hook in hooks):
            where = f"module {name!r}" if name else "the model"
            raise ConversionError(f"{_STAYS}: {where} has hooks, which other runtimes do not call")
    if keeps_state(model):
        raise ConversionError(f"{_STAYS}: its forward changes the module's state or its inputs")


def _list_input_specs(model: TorchModel) -> tuple[TensorSpec, ...]:
    """Return the inputs in the order of a batch."""
    call, signature = model.example, model.signature
    if not all(isinstance(value, torch.Tensor) for value in (*call.args, *call.kwargs.values())):
        raise ConversionError(f"{_STAYS}: its inputs are nested, or not only tensors")
    if len(call.args) > len(signature.parameters):
        raise ConversionError(f"{_STAYS}: its forward takes a variable number of inputs")
    provided = [*signature.parameters[: len(call.args)], *call.kwargs]
    order = [*signature.names, *signature.parameters, *provided]
    return tuple(
        _build_spec(name, provided.index(name)) for name in sorted(provided, key=order.index)
    )


def _build_spec(name: str, position: int) -> TensorSpec:
    return TensorSpec(name, f"#{position}", None, None)


def _build_output_containers(
    spec: pytree.TreeSpec, leaves: list[Any], counter: list[int]
) -> Containers:
    """Return the containers of the outputs; consume leaves, and count tensors in `counter`."""
    if spec.is_leaf():
        leaf = leaves.pop(0)
        if leaf is None:
            return None
        if not isinstance(leaf, Node):
            raise ConversionError(f"{_STAYS}: it returns {leaf!r}, which is not a tensor")
        counter[0] += 1
        return counter[0] - 1
    parts = [_build_output_containers(child, leaves, counter) for child in list_child_specs(spec)]
    kind = spec.type
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], parts]
    keys = value_names(spec)
    if keys is None or kind is namedtuple or not isinstance(kind, type):
        raise ConversionError(f"{_STAYS}: it returns a {getattr(kind, '__name__', kind)}")
    is_plain = kind in (dict, OrderedDict)
    return [DICT if is_plain else NAMED, dict(zip(keys, parts, strict=True))]
