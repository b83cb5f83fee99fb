"""Outputs of the same ops of two models, in chunks of ops that fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, OpOutput
from neural_mp.util.pytree import batch_size_of

#: Maximum bytes of op outputs of one model held at once.
HELD_BYTES = 256 << 20
#: Maximum bytes of weights in functions that are kept between batches.
KEPT_BYTES = 2 << 30
#: Number of ops in a chunk while the sizes of outputs are unknown.
_AT_FIRST = 8

_Values = Callable[[Any], Mapping[str, OpOutput]]


class ChunkedOutputs:
    """Outputs of ops of two models in chunks, in the order of the graph.

    A model runs once per chunk; most batches need a single chunk. The first batch determines the
    sizes of the outputs.
    """

    def __init__(self, a: AnyModel, b: AnyModel, ops: Sequence[str]) -> None:
        self._models = a, b
        self._ops = list(ops)
        self._bytes: dict[str, int] = {}
        self._samples = 0
        self._groups: list[tuple[str, ...]] = []
        self._made: dict[tuple[str, ...], tuple[_Values, _Values]] = {}

    def values(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """Yield the outputs of the ops in both models, for one batch."""
        samples = batch_size_of(inputs)
        if not self._samples:
            yield from self._measure_chunks(inputs)
        else:
            if samples > self._samples or not self._groups:
                self._divide_into_chunks(samples)
            for group in self._groups:
                yield from self._run(group, inputs)
        self._samples = max(self._samples, samples)

    def _measure_chunks(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """Yield all outputs, in chunks that fit if no op exceeds the largest output so far."""
        start, count = 0, _AT_FIRST
        while start < len(self._ops):
            group = tuple(self._ops[start : start + count])
            for op, reference, output in self._run(group, inputs):
                self._bytes[op] = reference.real.nbytes
                yield op, reference, output
            start += len(group)
            count = max(1, HELD_BYTES // max(self._bytes.values(), default=1))
        self._made.clear()

    def _divide_into_chunks(self, samples: int) -> None:
        # Sizes of outputs are assumed proportional to the number of samples.
        ratio = samples / self._samples
        self._bytes = {op: int(size * ratio) for op, size in self._bytes.items()}
        self._groups, total = [], 0
        waiting: list[str] = []
        for op in (op for op in self._ops if op in self._bytes):
            if waiting and total + self._bytes[op] > HELD_BYTES:
                self._groups.append(tuple(waiting))
                waiting, total = [], 0
            waiting.append(op)
            total += self._bytes[op]
        if waiting:
            self._groups.append(tuple(waiting))
        self._made.clear()

    def _run(
        self, group: tuple[str, ...], inputs: object
    ) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        first, second = self._output_functions(group)
        values = dict(first(inputs))
        second_values = dict(second(inputs))
        for op in group:
            if op in values and op in second_values:
                yield op, values.pop(op), second_values.pop(op)

    def _output_functions(self, group: tuple[str, ...]) -> tuple[_Values, _Values]:
        if group not in self._made:
            weights = sum(model.size for model in self._models)
            if (len(self._made) + 1) * weights > KEPT_BYTES or not self._groups:
                self._made.clear()
            a, b = self._models
            self._made[group] = a.op_outputs(group), b.op_outputs(group)
        return self._made[group]
