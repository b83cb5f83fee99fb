"""Moments of the inputs of dense layers, and models with weights that were rounded elsewhere."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from neural_mp.adaptors.common.sensitivity.input_moments import MomentSums
from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight, InputMoments
from neural_mp.adaptors.pytorch.capture.module_capture import visited
from neural_mp.adaptors.pytorch.decoders.decoder_blocks import (
    Block,
    BlockCall,
    advance,
    block_calls,
    decoder_blocks,
)
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import LINEAR
from neural_mp.util.memory import FREED, MAX_RESULTS


def input_moments(
    model: TorchModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, InputMoments]:
    """Return op → the moments of its inputs, for dense layers that the batches reach."""
    readers: defaultdict[Node, list[str]] = defaultdict(list)
    for part in model.parts.values():
        for name, node in fx.op_nodes(part.portable).items():
            if name in ops and node.target is LINEAR:
                readers[node.args[0]].append(name)
    sums: dict[Node, MomentSums] = {}

    def add_moments(node: Node, run: Callable[[], Any]) -> Any:
        result = run()
        if node in readers:
            rows = result.detach().float().numpy()
            if node not in sums:
                sums[node] = MomentSums.of_size(rows.shape[-1])
            sums[node].add(rows)
        return result

    run = visited(model, add_moments, portable=True)
    for inputs in batches:
        run(model.call(inputs))
    means = {node: statistics.moments() for node, statistics in sums.items()}
    return {name: statistics for node, statistics in means.items() for name in readers[node]}


def block_moments(
    model: TorchModel,
    batches: Callable[[], Iterable[Any]],
    ops: Collection[str],
    is_kept: Callable[[Collection[str]], bool],
) -> Iterator[dict[str, InputMoments]]:
    """Yield the moments of the inputs of dense layers, block by block; see `Blocks.moments`."""
    blocks = decoder_blocks(model)
    remaining = {block.path: [op for op in block.layers if op in ops] for block in blocks}
    remaining = {
        path: op_names for path, op_names in remaining.items() if op_names and not is_kept(op_names)
    }
    calls = block_calls(model, blocks, batches()) if remaining else None
    if calls is None:
        return
    assert model.shell is not None
    for block, recorded in zip(blocks, calls.calls, strict=True):
        module = model.shell.get_submodule(block.path)
        op_names = remaining.pop(block.path, [])
        FREED.now()  # of a run of the model, or of the block before
        if op_names:
            yield moments_of_layers(module, block, op_names, calls.states, recorded)
        if not remaining:
            return
        FREED.now()
        advance(module, calls.states, recorded)
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

    def hook_of(op: str) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        return lambda _, args: _add_moments(op, args[0])

    def _add_moments(op: str, tensor: torch.Tensor) -> None:
        first = next((name for name, value in inputs.items() if value is tensor), op)
        inputs[op] = tensor
        FREED.after(MAX_RESULTS * tensor.nbytes)
        # The first run decides which layers share: experts read other rows in every run.
        if alike.setdefault(op, first) == op:
            rows = tensor.detach().float().numpy()
            if op not in sums:
                sums[op] = MomentSums.of_size(rows.shape[-1])
            sums[op].add(rows)

    hooks = [
        module.get_submodule(block.layers[op]).register_forward_pre_hook(hook_of(op)) for op in ops
    ]
    try:
        for state, call in zip(states, calls, strict=True) if ops else ():
            inputs.clear()
            with torch.no_grad():
                call.run(module, state)
    finally:
        for hook in hooks:
            hook.remove()
    means = {op: statistics.moments() for op, statistics in sums.items()}
    return {op: means[first] for op, first in alike.items()}


def with_weights(model: TorchModel, weights: Mapping[str, GroupedWeight]) -> TorchModel:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights)
