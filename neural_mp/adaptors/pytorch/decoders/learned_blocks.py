"""Learned rounding of decoder blocks against the results of the float blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.common.weights.autoround import LearnedRounding, LearnOptions
from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight, InputMoments, Quantizer
from neural_mp.adaptors.pytorch import layer_weights
from neural_mp.adaptors.pytorch.decoders.decoder_blocks import (
    Block,
    BlockCall,
    advance_states,
    find_decoder_blocks,
    moments_of_layers,
    record_block_calls,
    select_counted_rows,
)
from neural_mp.adaptors.pytorch.graph.model import TorchModel, assemble_module
from neural_mp.adaptors.pytorch.graph.stand_ins import StandIn
from neural_mp.util.pytree import Array

#: Samples of a step, at least; batches are not divided.
_SAMPLES_PER_STEP = 8
#: Steps between two errors that decide on the best weights, and the batches of these, at most.
_STEPS_PER_TRIAL, _BATCHES_TRIED = 20, 16


class _RoundedLayer(StandIn):
    """A dense layer with a float weight [outputs, inputs] that is no parameter of the model."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = weight
        self.bias = bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


def iterate_learned_weights(
    model: TorchModel,
    batches: Callable[[], Iterable[Any]],
    quantizers: Mapping[str, Quantizer],
    options: LearnOptions,
    recall: Callable[[Collection[str]], Mapping[str, GroupedWeight] | None],
    start: Callable[[str, InputMoments | None], GroupedWeight],
) -> Iterator[dict[str, GroupedWeight]]:
    """Yield op → learned weight, block by block; see `Blocks.learned`."""
    blocks = find_decoder_blocks(model)
    calls = record_block_calls(model, blocks, batches()) if blocks else None
    if calls is None:
        return
    weights = layer_weights.constant_weights(model)
    exact, rounded = calls.states, list(calls.states)
    for index, block in enumerate(blocks):
        assert model.shell is not None
        module = model.shell.get_submodule(block.path)
        ops = [op for op in block.layers if op in quantizers]
        learned = recall(ops) if ops else {}
        first: dict[str, GroupedWeight] = {}
        if learned is None and options.limit.is_reached():
            return  # the caller corrects the other layers by themselves
        if learned is None:
            informed = [op for op in ops if quantizers[op].without_learning.spec.needs_data]
            moments = moments_of_layers(module, block, informed, exact, calls.calls[index])
            first = {op: start(op, moments.pop(op, None)) for op in ops}
        advance_states(module, exact, calls.calls[index])
        student = _Student.copy_block(module, block, {op: weights[op] for op in ops})
        if learned is None:
            learning = {op: LearnedRounding(weights[op], quantizers[op], first[op]) for op in ops}
            random = np.random.default_rng([options.seed, index])
            learned = student.learn_weights(
                learning, rounded, exact, calls.calls[index], options, random
            )
        student.set_weights(learned)
        advance_states(student.module, rounded, calls.calls[index])
        calls.calls[index].clear()
        if ops:
            yield dict(learned)


class _Student:
    """A copy of a block with rounded weights; other weights are shared.

    Attributes:
        module: the copy.
        layers: op → its layer in the copy.
    """

    def __init__(self, module: nn.Module, layers: Mapping[str, _RoundedLayer]) -> None:
        self.module = module
        self.layers = layers

    @classmethod
    def copy_block(cls, module: nn.Module, block: Block, weights: Mapping[str, Any]) -> _Student:
        """Return the copy with copies of some weights, by op."""
        layers = {}
        for op, weight in weights.items():
            layer: Any = module.get_submodule(block.layers[op])
            rounded = _RoundedLayer(torch.from_numpy(weight.copy()), layer.bias)
            layers[op] = rounded.stand_for(layer, None)
        return cls(assemble_module(module, {block.layers[op]: layers[op] for op in layers}), layers)

    def set_weights(self, weights: Mapping[str, GroupedWeight]) -> None:
        for op, weight in weights.items():
            self.layers[op].weight.data.copy_(torch.from_numpy(weight.to_floats()))

    def learn_weights(
        self,
        learning: Mapping[str, LearnedRounding],
        inputs: list[torch.Tensor],
        targets: list[torch.Tensor],
        calls: list[BlockCall],
        options: LearnOptions,
        random: np.random.Generator,
    ) -> dict[str, GroupedWeight]:
        """Return the weights with the least error among those before, during and after descent."""
        best = {op: rounding.start for op, rounding in learning.items()}
        self.set_weights(best)
        tried = range(0, len(inputs), -(-len(inputs) // _BATCHES_TRIED))
        least = self.mean_error(tried, inputs, targets, calls)
        steps = _batches_of_steps(inputs, options.steps, random)
        for step, chosen in enumerate(steps, 1):
            gradients = self._compute_weight_gradients(chosen, inputs, targets, calls)
            for op, gradient in gradients.items():
                learning[op].descend_gradient(gradient, options.step_size(step - 1))
            now = {op: rounding.round_weight() for op, rounding in learning.items()}
            self.set_weights(now)
            ends = options.limit.is_reached()
            if step % _STEPS_PER_TRIAL and step < options.steps and not ends:
                continue
            error = self.mean_error(tried, inputs, targets, calls)
            if error < least:
                best, least = now, error
            if ends:
                break
        return best

    def _compute_weight_gradients(
        self,
        chosen: Iterable[int],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        calls: Sequence[BlockCall],
    ) -> dict[str, Array]:
        """Return op → gradient of the error on some batches, for the layers that ran."""
        weights = [layer.weight.requires_grad_() for layer in self.layers.values()]
        losses = (
            self._compute_residual(calls[index], inputs[index], targets[index]).square().mean()
            for index in chosen
        )
        gradients = torch.autograd.grad(sum(losses, torch.zeros(())), weights, allow_unused=True)
        for weight in weights:
            weight.requires_grad_(False)
        pairs = zip(self.layers, gradients, strict=True)
        return {op: gradient.numpy() for op, gradient in pairs if gradient is not None}

    def mean_error(
        self,
        indices: Iterable[int],
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        calls: Sequence[BlockCall],
    ) -> float:
        with torch.no_grad():
            residuals = (
                self._compute_residual(calls[index], inputs[index], targets[index])
                for index in indices
            )
            return sum(float(residual.square().sum()) for residual in residuals)

    def _compute_residual(
        self, call: BlockCall, states: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """Return result minus target, for the tokens that count."""
        residual = call.run_block(self.module, states).float() - target.float()
        return select_counted_rows(residual, call.masks)


def _batches_of_steps(
    inputs: list[torch.Tensor], steps: int, random: np.random.Generator
) -> Iterator[list[int]]:
    """Yield the places of the batches of each step, every batch once before any comes again."""
    count = min(len(inputs), -(-_SAMPLES_PER_STEP // max(len(inputs[0]), 1)))
    order: list[int] = []
    for _ in range(steps):
        if len(order) < count:
            order += random.permutation(len(inputs)).tolist()
        yield order[:count]
        del order[:count]
