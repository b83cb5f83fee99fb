"""Two models of one origin, run on the same data: how far apart their outputs and ops are.

Every value is reduced to a few sums as soon as both models have computed it, so that memory grows
neither with the data nor with the model.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.graph import Op, OpGraph
from neural_mp.errors import ComparisonError
from neural_mp.tuning.op_outputs import ChunkedOutputs
from neural_mp.tuning.sqnr import LEAST_DECIBELS, MAX_NSR
from neural_mp.util.display import displays
from neural_mp.util.pytree import Array, batch_size_of, named_float_arrays
from neural_mp.util.text import counted

#: Decibels above which values count as equal: float32 itself rounds at about 140.
EQUAL = 120.0
#: By so many decibels an op must lie below all of its inputs to count as one where models part:
#: half of its noise, at the least, then arises in it.
MIN_DROP_DB = 3.0
#: Numbers reduced at once.
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Difference:
    """How far a tensor of one model is from that of the other, over all data.

    Attributes:
        name: of the output or op.
        sqnr: signal to quantization noise ratio in decibels, 10·log₁₀(Σa² / Σ(b - a)²); infinite
            where nothing differs, -90 where B holds what is no number, or A nothing but zeros.
        cosine: cosine similarity of all values; 1 where both are zero.
        max_abs_error: the largest absolute difference; infinite where B holds what is no number.
    """

    name: str
    sqnr: float
    cosine: float
    max_abs_error: float

    @property
    def noise(self) -> float:
        """The power of the difference, as a share of that of the signal."""
        return 0.0 if math.isinf(self.sqnr) else 10 ** (-self.sqnr / 10)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; infinity, which JSON lacks, as None."""
        return {
            key: None if isinstance(value, float) and math.isinf(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class LayerDifference(Difference):
    """The same of an op.

    Attributes:
        type: of the op, as the untouched model has it.
        fused_ops: preceding ops without a result in both models, with their types, e.g. a
            convolution that runs in one kernel with its ReLU.
        inputs: the ops compared, or inputs of the model, that it depends on most nearly.
        dtypes: the types that A and B have the result in.
        sqnr_drop: decibels below the lowest of its inputs, ratios clipped at 120; negative if
            above one of them.
        introduced_nsr: its noise less the largest of its inputs, at least 0.
    """

    type: str
    fused_ops: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    dtypes: tuple[str, str]
    sqnr_drop: float
    introduced_nsr: float


@dataclass(frozen=True)
class Comparison:
    """How far apart two models are.

    Attributes:
        outputs: for every output with floating-point numbers.
        layers: for every op that both have a result of, in the order of the graph.
        first: where they part: the first op whose ratio is below 20 dB, and clearly (3 dB) below
            that of all of its inputs. Where none is so low, the op with the largest fall of at
            least 3 dB. None where there is none.
        left_out: why ops were not compared → their names.
        batches: how many batches were run.
        samples: how many samples they held.
    """

    outputs: tuple[Difference, ...]
    layers: tuple[LayerDifference, ...]
    first: LayerDifference | None
    left_out: Mapping[str, tuple[str, ...]]
    batches: int
    samples: int

    def worst(self, count: int) -> tuple[LayerDifference, ...]:
        """The ops in which most noise arises, at most so many, in the order of the graph."""
        ranked = sorted(self.layers, key=lambda layer: -layer.introduced_nsr)[:count]
        chosen = {layer.name for layer in ranked if layer.introduced_nsr > 0}
        return tuple(layer for layer in self.layers if layer.name in chosen)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as written to JSON."""
        return {
            "outputs": [output.to_dict() for output in self.outputs],
            "layers": [layer.to_dict() for layer in self.layers],
            "first": None if self.first is None else self.first.name,
            "left_out": {reason: list(names) for reason, names in self.left_out.items()},
            "batches": self.batches,
            "samples": self.samples,
        }

    def __repr__(self) -> str:
        lowest = min((output.sqnr for output in self.outputs), default=None)
        level = "no outputs of floats" if lowest is None else f"outputs {lowest:.1f} dB"
        place = "they part nowhere" if self.first is None else f"they part at {self.first.name!r}"
        return f"Comparison({level}, {len(self.layers)} ops, {place})"

    def __rich__(self) -> Any:
        return displays().table(self)


@dataclass
class _Sums:
    """What is kept of a tensor: sums over all data."""

    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    max_abs_error: float = 0.0
    broken: bool = False

    def take(self, one: Array, other: Array) -> None:
        """Take in what A and B have for one batch, of one shape."""
        flat, beside = one.reshape(-1), other.reshape(-1)
        for start in range(0, flat.size, _BLOCK):
            a = flat[start : start + _BLOCK].astype(np.float64)
            b = beside[start : start + _BLOCK].astype(np.float64)
            if not np.isfinite(a).all() or not np.isfinite(b).all():
                # Minus infinity in both, as in masks, is no difference, but no signal either.
                same = (a == b) | (np.isnan(a) & np.isnan(b))
                fine = np.isfinite(a) & np.isfinite(b)
                self.broken = self.broken or not (same | fine).all()
                a, b = a[fine], b[fine]
            difference = b - a
            self.signal += float(a @ a)
            self.other += float(b @ b)
            self.product += float(a @ b)
            self.noise += float(difference @ difference)
            self.max_abs_error = max(self.max_abs_error, float(np.abs(difference).max(initial=0)))

    def difference(self, name: str) -> Difference:
        """The figures that follow."""
        share = self.noise / self.signal if self.signal else MAX_NSR if self.noise else 0.0
        share = MAX_NSR if self.broken else min(share, MAX_NSR)
        sizes = math.sqrt(self.signal) * math.sqrt(self.other)
        cosine = min(1.0, self.product / sizes) if sizes else 0.0
        return Difference(
            name,
            -10 * math.log10(share) if share else math.inf,
            cosine if self.noise else 1.0,
            math.inf if self.broken else self.max_abs_error,
        )


def compare_models(
    a: AnyModel, b: AnyModel, batches: Iterable[Any], rescaled: frozenset[str] = frozenset()
) -> Comparison:
    """Run two models on the same batches, and compare their outputs and the results of their ops.

    Args:
        a: what is compared with, such as the FP32 model.
        b: what is compared, such as the converted model.
        batches: inputs; walked once.
        rescaled: ops whose results have other scales in one of the models, which is made up for
            behind them: they are not compared.

    Raises:
        ComparisonError: they are not of one origin.
    """
    run = _Run.of(a, b, rescaled)
    for inputs in batches:
        run.take(inputs)
    return run.result()


@dataclass
class _Run:
    """A comparison as it goes on; `graph` is that of the model which has more of its ops."""

    a: AnyModel
    b: AnyModel
    graph: OpGraph
    left_out: dict[str, tuple[str, ...]]
    groups: ChunkedOutputs
    outputs: dict[str, _Sums] = field(default_factory=dict)
    layers: dict[str, _Sums] = field(default_factory=dict)
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    batches: int = 0
    samples: int = 0

    @classmethod
    def of(cls, a: AnyModel, b: AnyModel, rescaled: frozenset[str]) -> _Run:
        """A comparison of the ops that both models have."""
        if a.adaptor.framework != b.adaptor.framework:
            raise ComparisonError(
                f"A is a model of {a.adaptor.framework}, B one of {b.adaptor.framework}; models "
                f"are compared op by op, so both must be of one framework and one origin"
            )
        one, other = a.results, b.results
        both = [op for op in one if op.name in other]
        if 2 * len(both) < min(len(one), len(other)) or not both:
            raise ComparisonError(
                f"the models have {counted(len(both), 'op')} in common: A has {_some(one)}, B has "
                f"{_some(other)}; give two models of one origin, such as a model file and what was "
                f"made of that very file"
            )
        kept = {op.name: op for op in both if op.name not in rescaled}
        left_out = {
            "run within the kernel of another op in B": _missing(one, other),
            "run within the kernel of another op in A": _missing(other, one),
            "have other scales by a repair": tuple(op.name for op in both if op.name in rescaled),
        }
        whole = one if len(one) >= len(other) else other
        return cls(a, b, whole, left_out, ChunkedOutputs(a, b, list(kept)))

    def take(self, inputs: object) -> None:
        """Run one batch."""
        self.batches += 1
        self.samples += batch_size_of(inputs)
        self._take_outputs(*(named_float_arrays(model(inputs)) for model in (self.a, self.b)))
        for op, one, other in self.groups.values(inputs):
            if one.real.shape != other.real.shape:
                raise ComparisonError(
                    f"the result of op {op!r} has the shape {list(one.real.shape)} in A and "
                    f"{list(other.real.shape)} in B; give two models of one origin"
                )
            self.layers.setdefault(op, _Sums()).take(one.real, other.real)
            self.dtypes[op] = one.stored, other.stored

    def _take_outputs(self, one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
        # By position: what was saved and brought back may call its outputs otherwise.
        shapes, theirs = ([list(a.shape) for a in found.values()] for found in (one, other))
        if shapes != theirs:
            raise ComparisonError(
                f"the models have other outputs: A gives arrays of floats of the shapes {shapes}, "
                f"B of {theirs}; give two models of one origin"
            )
        for name, found in zip(one, other.values(), strict=True):
            self.outputs.setdefault(name, _Sums()).take(one[name], found)

    def result(self) -> Comparison:
        """What was found."""
        found = {op: sums.difference(op) for op, sums in self.layers.items()}
        # What was not compared is passed: an op reads the nearest ops that were.
        graph = self.graph.with_only({op.name: op for op in self.graph if op.name in found})
        known = {*found, *(name for names in self.left_out.values() for name in names)}
        silent = tuple(op.name for op in self.graph if op.name not in known)
        left_out = {**self.left_out, "hold no floating-point numbers, or did not run": silent}
        along = _run_along(self.graph, found)
        layers = tuple(self._layer(op, found, along.get(op.name, ())) for op in graph)
        return Comparison(
            tuple(sums.difference(name) for name, sums in self.outputs.items()),
            layers,
            _first(layers),
            {reason: names for reason, names in left_out.items() if names},
            self.batches,
            self.samples,
        )

    def _layer(
        self, op: Op, found: Mapping[str, Difference], along: Iterable[Op]
    ) -> LayerDifference:
        own = found[op.name]
        read = [found[name] for name in op.inputs if name in found]
        lowest = min((_capped(source.sqnr) for source in read), default=EQUAL)
        return LayerDifference(
            **asdict(own),
            type=op.type,
            fused_ops=tuple((part.name, part.type) for part in along),
            inputs=op.inputs,
            dtypes=self.dtypes[op.name],
            sqnr_drop=lowest - _capped(own.sqnr),
            introduced_nsr=max(
                0.0, own.noise - max((source.noise for source in read), default=0.0)
            ),
        )


def _capped(sqnr: float) -> float:
    return min(sqnr, EQUAL)


def _first(layers: Iterable[LayerDifference]) -> LayerDifference | None:
    """Where the models part; see `Comparison.first`."""
    clear = [layer for layer in layers if layer.sqnr_drop >= MIN_DROP_DB]
    low = (layer for layer in clear if layer.sqnr < LEAST_DECIBELS)
    return next(low, max(clear, key=lambda layer: layer.sqnr_drop, default=None))


def _run_along(graph: OpGraph, compared: Collection[str]) -> dict[str, list[Op]]:
    """Op that was compared → those before it that were not, and that lead to it alone."""
    last: dict[str, str] = {}
    for op in reversed(tuple(graph)):
        readers = graph.consumer_names(op.name)
        reached = {name if name in compared else last.get(name, "") for name in readers}
        if len(reached) == 1:
            last[op.name] = reached.pop()
    found: dict[str, list[Op]] = {}
    for op in graph:
        if op.name not in compared and last.get(op.name):
            found.setdefault(last[op.name], []).append(op)
    return found


def _missing(one: OpGraph, other: OpGraph) -> tuple[str, ...]:
    return tuple(op.name for op in one if op.name not in other)


def _some(ops: Iterable[Op]) -> str:
    names: Iterator[str] = (repr(op.name) for op in ops)
    shown = [name for name, _ in zip(names, range(3), strict=False)]
    return ", ".join(shown) + ", …" if shown else "none"
