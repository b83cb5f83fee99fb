"""The results of the same ops of two models, of so many ops at a time as memory allows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, OpOutput
from neural_mp.util.pytree import batch_size_of

#: Bytes of results of one model that are held at once.
HELD_BYTES = 256 << 20
#: Bytes of weights in functions that are kept from batch to batch, rather than made anew.
KEPT_BYTES = 2 << 30
#: How many ops are run together while it is not known how large their results are.
_AT_FIRST = 8

_Values = Callable[[Any], Mapping[str, OpOutput]]


class ChunkedOutputs:
    """Ops that are run together, in the order of the graph.

    A model is run once for every group; on most batches there is one. The first batch tells how
    large the results are.

    Args:
        a: one model.
        b: the other.
        ops: ops that both have results of.
    """

    def __init__(self, a: AnyModel, b: AnyModel, ops: Sequence[str]) -> None:
        self._models = a, b
        self._ops = list(ops)
        self._bytes: dict[str, int] = {}
        self._samples = 0
        self._groups: list[tuple[str, ...]] = []
        self._made: dict[tuple[str, ...], tuple[_Values, _Values]] = {}

    def values(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """The results of the ops in both models, for one batch."""
        samples = batch_size_of(inputs)
        if not self._samples:
            yield from self._measured(inputs)
        else:
            if samples > self._samples or not self._groups:
                self._pack(samples)
            for group in self._groups:
                yield from self._run(group, inputs)
        self._samples = max(self._samples, samples)

    def _measured(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """The same, with no more ops together than fit if all are as large as the largest yet."""
        start, count = 0, _AT_FIRST
        while start < len(self._ops):
            group = tuple(self._ops[start : start + count])
            for op, one, other in self._run(group, inputs):
                self._bytes[op] = one.real.nbytes
                yield op, one, other
            start += len(group)
            count = max(1, HELD_BYTES // max(self._bytes.values(), default=1))
        self._made.clear()

    def _pack(self, samples: int) -> None:
        """Put the ops into groups for batches of so many samples."""
        # Of later batches the results are taken to be as much larger as they have more samples.
        ratio = samples / self._samples
        self._bytes = {op: int(size * ratio) for op, size in self._bytes.items()}
        self._groups, held = [], 0
        waiting: list[str] = []
        for op in (op for op in self._ops if op in self._bytes):
            if waiting and held + self._bytes[op] > HELD_BYTES:
                self._groups.append(tuple(waiting))
                waiting, held = [], 0
            waiting.append(op)
            held += self._bytes[op]
        if waiting:
            self._groups.append(tuple(waiting))
        self._made.clear()

    def _run(
        self, group: tuple[str, ...], inputs: object
    ) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        one, other = self._functions(group)
        values = dict(one(inputs))
        others = dict(other(inputs))
        for op in group:
            if op in values and op in others:
                yield op, values.pop(op), others.pop(op)

    def _functions(self, group: tuple[str, ...]) -> tuple[_Values, _Values]:
        if group not in self._made:
            weights = sum(model.size for model in self._models)
            if (len(self._made) + 1) * weights > KEPT_BYTES or not self._groups:
                self._made.clear()
            a, b = self._models
            self._made[group] = a.values(group), b.values(group)
        return self._made[group]
