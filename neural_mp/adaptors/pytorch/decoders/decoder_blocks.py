"""Decoder blocks of a model in the user's own code: their calls, and moments of layer inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.sensitivity import MomentSums
from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight, InputMoments
from neural_mp.adaptors.pytorch.capture.module_capture import run_call, visit_nodes
from neural_mp.adaptors.pytorch.decoders.experts import ROUTED_TOKENS
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR
from neural_mp.util.system.memory import FREED, MAX_RESULTS
from neural_mp.util.token_masks import TokenMasks, find_token_masks

#: Name of the first argument of a block in `transformers`.
_STATES = "hidden_states"


@dataclass(frozen=True)
class Block:
    """A block of a decoder.

    Attributes:
        path: path of the module.
        layers: op → path of its layer within the block, for the dense layers.
    """

    path: str
    layers: Mapping[str, str]


@dataclass(frozen=True)
class BlockCall:
    """A call of a block without its hidden states.

    Attributes:
        args: further arguments by position.
        kwargs: arguments by name.
        masks: the tokens of the batch that count.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    masks: TokenMasks

    def run_block(self, block: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that a block returns."""
        return _get_hidden_states(block(states, *self.args, **self.kwargs))


@dataclass(frozen=True)
class BlockCalls:
    """The calls of all blocks.

    Attributes:
        states: the hidden states that the first block reads, one per batch.
        calls: block → one call per batch. Calls share equal tensors, such as masks.
    """

    states: list[torch.Tensor]
    calls: list[list[BlockCall]]


def find_decoder_blocks(model: TorchModel) -> tuple[Block, ...]:
    """Return the blocks of a model: the items of the module list with the most dense layers.

    Empty if the model is one graph, or has no such list.
    """
    if model.shell is None:
        return ()
    layers = {
        name: path
        for path, part in model.parts.items()
        for name, node in fx.map_op_nodes(part.portable).items()
        if node.target is LINEAR
    }
    best: tuple[Block, ...] = ()
    for path, module in model.shell.named_modules():
        if isinstance(module, nn.ModuleList):
            blocks = tuple(_build_block(f"{path}.{index}", layers) for index in range(len(module)))
            if sum(len(b.layers) for b in blocks) > sum(len(b.layers) for b in best):
                best = blocks
    return best


def _build_block(path: str, layers: Mapping[str, str]) -> Block:
    inside = {
        op: layer_path.removeprefix(f"{path}.")
        for op, layer_path in layers.items()
        if layer_path.startswith(f"{path}.")
    }
    return Block(path, inside)


def record_block_calls(
    model: TorchModel, blocks: Iterable[Block], batches: Iterable[Any]
) -> BlockCalls | None:
    """Run a model on batches, and return the calls of its blocks.

    None if the blocks do not read one another's results in order, each once per run.
    """
    assert model.shell is not None
    modules = [model.shell.get_submodule(block.path) for block in blocks]
    recorder = _Recorder(len(modules))
    hooks = []
    for index, module in enumerate(modules):
        hooks.append(module.register_forward_pre_hook(recorder.input_hook(index), with_kwargs=True))
        hooks.append(module.register_forward_hook(recorder.keep_result))
    try:
        for inputs in batches:
            recorder.shared.clear()
            recorder.masks = find_token_masks(inputs)
            run_call(model, model.shell, model.call(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.recorded_calls()


def advance_states(module: nn.Module, states: list[torch.Tensor], calls: list[BlockCall]) -> None:
    """Replace the inputs of a block by its results."""
    with torch.no_grad():
        for index, call in enumerate(calls):
            states[index] = call.run_block(module, states[index])
            FREED.note_freed_bytes(MAX_RESULTS * states[index].nbytes)


class _Recorder:
    def __init__(self, blocks: int) -> None:
        self.states: list[torch.Tensor] = []
        self.calls: list[list[BlockCall]] = [[] for _ in range(blocks)]
        self.is_chain = True
        self.masks = TokenMasks({})
        self._last: torch.Tensor | None = None
        self.shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def input_hook(self, index: int) -> Callable[..., None]:
        def record_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = dict(kwargs)
            states = arguments.pop(_STATES, None) if not args else args[0]
            if index == 0:
                self.states.append(states)
            elif states is not self._last:
                self.is_chain = False
            self.calls[index].append(self._build_call(index, args[1:], arguments))

        return record_call

    def keep_result(self, _: nn.Module, args: object, result: object) -> None:
        """Keep the result of a block: the next block must read it."""
        self._last = _get_hidden_states(result)
        FREED.note_freed_bytes(MAX_RESULTS * getattr(self._last, "nbytes", 0))

    def _build_call(
        self, index: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> BlockCall:
        earlier = self.calls[index][0] if self.calls[index] else None
        # A second run would fill a key-value cache again.
        options = {
            name: None if hasattr(value, "update") and hasattr(value, "get_seq_length") else value
            for name, value in kwargs.items()
        }
        arguments = (args, options)
        leaves, structure = pytree.tree_flatten(arguments)
        first = [] if earlier is None else pytree.tree_leaves((earlier.args, dict(earlier.kwargs)))
        if len(first) != len(leaves):
            first = leaves
        shared = [
            self._share_equal_tensor(new, old) for new, old in zip(leaves, first, strict=True)
        ]
        position, named = pytree.tree_unflatten(shared, structure)
        return BlockCall(position, named, self.masks)

    def _share_equal_tensor(self, new: object, old: Any) -> object:
        if not isinstance(new, torch.Tensor):
            return new
        if id(new) not in self.shared:
            is_equal = (
                isinstance(old, torch.Tensor)
                and new.shape == old.shape
                and new.dtype == old.dtype
                and torch.equal(new, old)
            )
            self.shared[id(new)] = new, old if is_equal else new
        return self.shared[id(new)][1]

    def recorded_calls(self) -> BlockCalls | None:
        """Return the recorded calls; None if the blocks are no chain."""
        alike = all(len(calls) == len(self.states) for calls in self.calls)
        tensors = all(isinstance(states, torch.Tensor) for states in self.states)
        is_chain = self.is_chain and alike and tensors and bool(self.states)
        return BlockCalls(self.states, self.calls) if is_chain else None


def _get_hidden_states(result: object) -> Any:
    return result[0] if isinstance(result, tuple) else result


def select_counted_rows(values: torch.Tensor, masks: TokenMasks) -> torch.Tensor:
    """Return the rows of hidden states [..., inputs] whose tokens count.

    Other tensors, e.g. of images, are returned unchanged.
    """
    routed = ROUTED_TOKENS.get()
    if routed is not None:
        flat = [mask.reshape(-1) for mask in masks.by_shape.values()]
        is_of_batch = len(flat) == 1 and len(values) == len(routed)
        return values[torch.from_numpy(flat[0])[routed]] if is_of_batch else values
    mask = masks.find_mask(tuple(values.shape))
    return values if mask is None else values[torch.from_numpy(mask)]


def collect_input_moments(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, InputMoments]:
    """Return op → the moments of its inputs, for dense layers that the batches reach."""
    readers: defaultdict[Node, list[str]] = defaultdict(list)
    for part in model.parts.values():
        for name, node in fx.map_op_nodes(part.portable).items():
            if name in ops and node.target is LINEAR:
                readers[node.args[0]].append(name)
    sums: dict[Node, MomentSums] = {}
    masks = TokenMasks({})

    def add_moments(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if node in readers:
            rows = select_counted_rows(result.detach(), masks).float().numpy()
            if node not in sums:
                sums[node] = MomentSums.of_size(rows.shape[-1])
            sums[node].add_inputs(rows)
        return result

    run = visit_nodes(model, add_moments, portable=True)
    for inputs in batches:
        masks = find_token_masks(inputs)
        run(model.call(inputs))
    means = {node: statistics.finish_moments() for node, statistics in sums.items()}
    return {name: statistics for node, statistics in means.items() for name in readers[node]}


def iterate_block_moments(
    model: TorchModel,
    batches: Callable[[], Iterable[Any]],
    ops: Collection[str],
    is_kept: Callable[[Collection[str]], bool],
) -> Iterator[dict[str, InputMoments]]:
    """Yield the moments of the inputs of dense layers, block by block; see `Blocks.moments`."""
    blocks = find_decoder_blocks(model)
    remaining = {block.path: [op for op in block.layers if op in ops] for block in blocks}
    remaining = {
        path: op_names for path, op_names in remaining.items() if op_names and not is_kept(op_names)
    }
    calls = record_block_calls(model, blocks, batches()) if remaining else None
    if calls is None:
        return
    assert model.shell is not None
    for block, recorded in zip(blocks, calls.calls, strict=True):
        module = model.shell.get_submodule(block.path)
        op_names = remaining.pop(block.path, [])
        FREED.return_memory()  # of a run of the model, or of the block before
        if op_names:
            yield moments_of_layers(module, block, op_names, calls.states, recorded)
        if not remaining:
            return
        FREED.return_memory()
        advance_states(module, calls.states, recorded)
        recorded.clear()


def moments_of_layers(
    module: nn.Module,
    block: Block,
    ops: Collection[str],
    states: Sequence[torch.Tensor],
    calls: Sequence[BlockCall],
) -> dict[str, InputMoments]:
    """Return op → the moments of its inputs, for dense layers of a block that run.

    Layers that read the same tensors share their moments.
    """
    inputs: dict[str, torch.Tensor] = {}
    sums: dict[str, MomentSums] = {}
    alike: dict[str, str] = {}
    masks = TokenMasks({})

    def add_moments(op: str, _: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        tensor = args[0]
        first = next((name for name, value in inputs.items() if value is tensor), op)
        inputs[op] = tensor
        FREED.note_freed_bytes(MAX_RESULTS * tensor.nbytes)
        # The first run decides which layers share: experts read other rows in every run.
        if alike.setdefault(op, first) == op:
            rows = select_counted_rows(tensor.detach(), masks).float().numpy()
            if op not in sums:
                sums[op] = MomentSums.of_size(rows.shape[-1])
            sums[op].add_inputs(rows)

    hooks = [
        module.get_submodule(block.layers[op]).register_forward_pre_hook(partial(add_moments, op))
        for op in ops
    ]
    try:
        for state, call in zip(states, calls, strict=True) if ops else ():
            inputs.clear()
            masks = call.masks
            with torch.no_grad():
                call.run_block(module, state)
    finally:
        for hook in hooks:
            hook.remove()
    means = {op: statistics.finish_moments() for op, statistics in sums.items()}
    return {op: means[first] for op, first in alike.items()}


def with_weights(model: TorchModel, weights: Mapping[str, GroupedWeight]) -> TorchModel:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights)
