"""Captured PyTorch models, as used by the adaptor."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.pytorch.graph import kernel_ops, qdq_ops
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, CallSignature
from neural_mp.adaptors.pytorch.graph.graph_edit import OP_NAME, get_attribute
from neural_mp.adaptors.pytorch.graph.module_state import ModuleState
from neural_mp.adaptors.pytorch.graph.stand_ins import GraphStandIn, StandIn

T = TypeVar("T")

_CAST = torch.ops.aten._to_copy.default
#: Ops inserted by a conversion → kind of conversion.
CONVERSIONS = {
    kernel_ops.quantize_uint8: "quantize",
    kernel_ops.quantize_rgb: "quantize",
    kernel_ops.quantize_gated: "quantize",
    qdq_ops.quantize_dynamic: "quantize",
    kernel_ops.dequantize_uint8: "dequantize",
    _CAST: "cast",
}
#: Path of the part that is the whole model.
WHOLE = ""


@dataclass(frozen=True)
class Part:
    """Captured graph of a whole model or of one of its modules.

    Attributes:
        portable: graph in the saved form: float ops, casts, quantize/dequantize pairs.
        runnable: graph that runs: `portable` itself, or its integer kernels.
        example: inputs the graph was captured with.
        is_converted: whether a plan changed the graph.
    """

    portable: GraphModule
    runnable: GraphModule
    example: CallArgs
    is_converted: bool = False


@dataclass(frozen=True)
class TorchModel:
    """A captured model.

    Attributes:
        parts: path of a module → its graph; only `WHOLE` if the whole model is one graph.
        example: example inputs of the model.
        signature: call signature of the model.
        shell: user's module whose code calls the parts; None if the whole model is one graph.
        original: the user's own module; None for a converted or restored model.
        warnings: capture warnings for the user.
        compiles: whether calls run through `torch.compile`.
        int8_cache: whether a converted decoder keeps keys and values in INT8.
        grouped: op → weight in 4 bits or less that the next conversion stores.
        config: the configuration of a `transformers` model, or its values in a restored model;
            None for other modules.
        keeps_state: whether the code of the shell keeps state from call to call.
    """

    parts: Mapping[str, Part]
    example: CallArgs
    signature: CallSignature
    shell: nn.Module | None = None
    original: nn.Module | None = None
    warnings: tuple[str, ...] = ()
    compiles: bool = False
    config: Any = None
    keeps_state: bool = False
    int8_cache: bool = False
    grouped: Mapping[str, GroupedWeight] = field(default_factory=dict, repr=False)

    @property
    def portable_graph(self) -> GraphModule:
        """Graph of the whole model in the saved form."""
        return self.parts[WHOLE].portable

    @property
    def runnable_graph(self) -> GraphModule:
        """Graph of the whole model that runs."""
        return self.parts[WHOLE].runnable

    def call(self, inputs: object) -> CallArgs:
        """Return the call for the inputs of one batch, arranged as at capture.

        Raises:
            DataError: if a value is not numeric, or the inputs do not fit the model.
        """
        return self.signature.call(inputs, like=self.example)

    @cached_property
    def module(self) -> nn.Module:
        """The module that runs: the graph, or the user's code with graphs of its modules."""
        if self.shell is None:
            return self.runnable_graph
        return self.assemble_parts(lambda part: GraphStandIn(part.runnable), self.converted_parts)

    def cached_result(self, make: Callable[[TorchModel], T]) -> T:
        """Return `make(self)`, cached for later calls."""
        if make not in self._cached_results:
            self._cached_results[make] = make(self)
        return self._cached_results[make]

    @cached_property
    def _cached_results(self) -> dict[Callable[[TorchModel], Any], Any]:
        return {}

    @property
    def counts(self) -> ConversionCounts:
        """Numbers of conversions inserted into the runnable graphs."""
        nodes = (node for part in self.parts.values() for node in part.runnable.graph.nodes)
        # Casts by the user have an op name; inserted casts have none.
        inserted = (n.target for n in nodes if n.target is not _CAST or OP_NAME not in n.meta)
        ours = [CONVERSIONS.get(target) for target in inserted]
        return ConversionCounts(*map(ours.count, ("cast", "quantize", "dequantize")))

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the portable form, by name."""
        module = self.assemble_parts(lambda part: part.portable)
        return {**dict(module.named_parameters()), **dict(module.named_buffers())}

    @property
    def converted_parts(self) -> Mapping[str, Part]:
        """The parts that a plan changed; for the others, the user's own modules can run."""
        if self.shell is None:
            return self.parts
        return {path: part for path, part in self.parts.items() if part.is_converted}

    def assemble_parts(
        self, make: Callable[[Part], nn.Module], parts: Mapping[str, Part] | None = None
    ) -> nn.Module:
        """Assemble the model from `make` of every part, or of some parts.

        Parts of the user's code that are `StandIn`s have the attributes of the layers they replace.
        """
        parts = self.parts if parts is None else parts
        modules = {path: make(part) for path, part in parts.items()}
        if self.shell is not None:
            for path, module in modules.items():
                if isinstance(module, StandIn):
                    graph = parts[path].portable if parts[path].is_converted else None
                    module.stand_for(self.shell.get_submodule(path), graph)
        return assemble_module(self.shell, modules)


def assemble_module(shell: nn.Module | None, parts: Mapping[str, nn.Module]) -> nn.Module:
    """Return the user's module with some modules replaced, by path; other weights stay shared.

    Without a shell, the only part is the whole model.
    """
    if shell is None:
        (whole,) = parts.values()
        return whole
    # deepcopy takes objects in the memo as they are instead of copying them.
    memo: dict[int, Any] = {id(weight): weight for weight in shell.parameters()}
    # Tensors with an autograd graph, e.g. a stored loss, refuse a deepcopy.
    memo.update(ModuleState(shell).copy_tensors())
    memo.update({id(shell.get_submodule(path)): part for path, part in parts.items()})
    return copy.deepcopy(shell, memo)


def model_fingerprint(model: TorchModel) -> str:
    """Return the digest of all ops with their options, in order, and all weights and constants."""
    digest = hashlib.sha256(b"int8_cache" if model.int8_cache else b"")
    for part in model.parts.values():
        _hash_graph_nodes(digest, part.portable)
    for name, value in sorted(model.weights.items()):
        digest.update(name.encode())
        _hash_tensor_bytes(digest, value)
    return digest.hexdigest()


def _hash_graph_nodes(digest: hashlib._Hash, module: GraphModule) -> None:
    for node in module.graph.nodes:
        arguments = f"{node.args} {node.kwargs}"
        digest.update(f"{node.op} {node.target} {node.name} {arguments};".encode())
        if node.op != "get_attr":
            continue
        # Constants in code are not buffers, and branches are graphs.
        value = get_attribute(module, node.target)
        if isinstance(value, GraphModule):
            _hash_graph_nodes(digest, value)
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            _hash_tensor_bytes(digest, value)


def _hash_tensor_bytes(digest: hashlib._Hash, value: torch.Tensor) -> None:
    stored = value.detach().contiguous().reshape(-1).view(torch.uint8)
    digest.update(stored.numpy().data)
