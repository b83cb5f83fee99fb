"""Decoder blocks of a model that runs in the user's own code: their calls, one block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.capture.module_capture import run_call
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR
from neural_mp.util.memory import FREED, MAX_RESULTS

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
    """A call of a block without its hidden states: further arguments by position and by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self, block: nn.Module, states: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that a block returns."""
        return _states_of(block(states, *self.args, **self.kwargs))


@dataclass(frozen=True)
class BlockCalls:
    """The calls of all blocks.

    Attributes:
        states: the hidden states that the first block reads, one per batch.
        calls: block → one call per batch. Calls share equal tensors, such as masks.
    """

    states: list[torch.Tensor]
    calls: list[list[BlockCall]]


def decoder_blocks(model: TorchModel) -> tuple[Block, ...]:
    """Return the blocks of a model: the items of the module list with the most dense layers.

    Empty if the model is one graph, or has no such list.
    """
    if model.shell is None:
        return ()
    layers = {
        name: path
        for path, part in model.parts.items()
        for name, node in fx.op_nodes(part.portable).items()
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


def block_calls(
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
        hooks.append(module.register_forward_pre_hook(recorder.before(index), with_kwargs=True))
        hooks.append(module.register_forward_hook(recorder.after))
    try:
        for inputs in batches:
            recorder.next_batch()
            run_call(model, model.shell, model.call(inputs))
    finally:
        for hook in hooks:
            hook.remove()
    return recorder.found()


def advance(module: nn.Module, states: list[torch.Tensor], calls: list[BlockCall]) -> None:
    """Replace the inputs of a block by its results."""
    with torch.no_grad():
        for index, call in enumerate(calls):
            states[index] = call.run(module, states[index])
            FREED.after(MAX_RESULTS * states[index].nbytes)


class _Recorder:
    """Hooks that record the calls of blocks."""

    def __init__(self, blocks: int) -> None:
        self.states: list[torch.Tensor] = []
        self.calls: list[list[BlockCall]] = [[] for _ in range(blocks)]
        self.is_chain = True
        self._last: torch.Tensor | None = None
        self._shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def next_batch(self) -> None:
        """Forget the tensors of the last batch."""
        self._shared.clear()

    def before(self, index: int) -> Callable[..., None]:
        """Return a hook that runs before a block."""

        def record_call(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = dict(kwargs)
            states = arguments.pop(_STATES, None) if not args else args[0]
            if index == 0:
                self.states.append(states)
            elif states is not self._last:
                self.is_chain = False
            self.calls[index].append(self._build_call(index, args[1:], arguments))

        return record_call

    def after(self, _: nn.Module, args: object, result: Any) -> None:
        """Keep the result of a block: the next block must read it."""
        self._last = _states_of(result)
        FREED.after(MAX_RESULTS * getattr(self._last, "nbytes", 0))

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
        return BlockCall(*pytree.tree_unflatten(shared, structure))

    def _share_equal_tensor(self, new: Any, old: Any) -> Any:
        if not isinstance(new, torch.Tensor):
            return new
        if id(new) not in self._shared:
            is_equal = (
                isinstance(old, torch.Tensor)
                and new.shape == old.shape
                and new.dtype == old.dtype
                and torch.equal(new, old)
            )
            self._shared[id(new)] = new, old if is_equal else new
        return self._shared[id(new)][1]

    def found(self) -> BlockCalls | None:
        """Return the recorded calls; None if the blocks are no chain."""
        alike = all(len(calls) == len(self.states) for calls in self.calls)
        tensors = all(isinstance(states, torch.Tensor) for states in self.states)
        is_chain = self.is_chain and alike and tensors and bool(self.states)
        return BlockCalls(self.states, self.calls) if is_chain else None


def _states_of(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result
