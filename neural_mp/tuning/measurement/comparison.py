"""Comparison of outputs and ops of two models of one origin on the same data.

A plan is compared with FP32 at each stage of its weights: rounded, reconstructed, trained.

Values are reduced to sums as soon as both models have computed them, so that memory grows neither
with the data nor with the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel, OpOutput
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import RECONSTRUCTIONS
from neural_mp.errors import ComparisonError
from neural_mp.runs.report import Stage, StageNoise
from neural_mp.search.corrections import without_reconstruction
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.sqnr import MIN_SQNR_DB
from neural_mp.util.noise import MAX_NSR, nsr_to_decibels
from neural_mp.util.pytree import Array, batch_size_of, named_float_arrays
from neural_mp.util.text import Displayed, format_count, load_displays

#: SQNR in dB above which values count as equal: float32 rounding is about 140 dB.
EQUAL = 120.0
#: Minimum SQNR drop of an op from its worst input to count as the origin of a difference: at least
#: half of its noise is then introduced by the op.
MIN_DROP_DB = 3.0
_SAME_ORIGIN = "give a model and a conversion of the same model"
#: Elements reduced at once.
_BLOCK = 1 << 18


@dataclass(frozen=True)
class Difference:
    """Difference between a tensor of model A and that of model B, over all data.

    Attributes:
        name: name of the output or op.
        sqnr: signal-to-quantization-noise ratio in dB, 10·log₁₀(Σa² / Σ(b - a)²); infinite without
            differences, -90 if B is not finite, or A is all zeros.
        cosine: cosine similarity of all values; 1 if both are zero.
        max_abs_error: the largest absolute difference; infinite if B is not finite.
    """

    name: str
    sqnr: float
    cosine: float
    max_abs_error: float

    @property
    def noise(self) -> float:
        """The noise-to-signal power ratio."""
        return 0.0 if math.isinf(self.sqnr) else 10 ** (-self.sqnr / 10)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict; infinity becomes None."""
        return {
            key: None if isinstance(value, float) and math.isinf(value) else value
            for key, value in asdict(self).items()
        }


@dataclass(frozen=True)
class LayerDifference(Difference):
    """Difference of an op's result.

    Attributes:
        type: type of the op in the unconverted model.
        fused_ops: preceding ops without a result in both models, with their types, e.g. a
            convolution fused with its ReLU.
        inputs: the nearest compared ops, or model inputs, that the op depends on.
        dtypes: dtypes of the result in A and B.
        sqnr_drop: dB below the lowest of its inputs, each ratio clipped at 120; negative if above
            one of them.
        introduced_nsr: NSR of the op minus the largest NSR of its inputs, at least 0.
    """

    type: str
    fused_ops: tuple[tuple[str, str], ...]
    inputs: tuple[str, ...]
    dtypes: tuple[str, str]
    sqnr_drop: float
    introduced_nsr: float


@dataclass(frozen=True)
class Comparison(Displayed):
    """Differences between two models.

    Attributes:
        outputs: differences of all floating-point outputs.
        layers: differences of all ops with results in both models, in the order of the graph.
        first: the first op below 20 dB that is at least 3 dB below all of its inputs; without one,
            the op with the largest drop of at least 3 dB; otherwise None.
        left_out: reason → names of ops that were not compared.
        batches: number of batches run.
        samples: number of samples in these batches.
    """

    outputs: tuple[Difference, ...]
    layers: tuple[LayerDifference, ...]
    first: LayerDifference | None
    left_out: Mapping[str, tuple[str, ...]]
    batches: int
    samples: int

    def worst(self, count: int) -> tuple[LayerDifference, ...]:
        """Return the `count` ops that introduce the most noise, in the order of the graph."""
        ranked = sorted(self.layers, key=lambda layer: -layer.introduced_nsr)[:count]
        chosen = {layer.name for layer in ranked if layer.introduced_nsr > 0}
        return tuple(layer for layer in self.layers if layer.name in chosen)

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict."""
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
        level = "no floating-point outputs" if lowest is None else f"outputs {lowest:.1f} dB"
        divergence = "no divergence"
        if self.first is not None:
            divergence = f"first divergence at {self.first.name!r}"
        return f"Comparison({level}, {len(self.layers)} ops, {divergence})"

    def __rich__(self) -> Any:
        return load_displays().render_table(self)


@dataclass
class _Sums:
    """Sums over all data of one tensor."""

    signal: float = 0.0
    other: float = 0.0
    product: float = 0.0
    noise: float = 0.0
    max_abs_error: float = 0.0
    broken: bool = False

    def add_batch(self, lhs: Array, rhs: Array) -> None:
        """Add the arrays of A and B for one batch, of equal shape."""
        values, rhs_values = lhs.reshape(-1), rhs.reshape(-1)
        for start in range(0, values.size, _BLOCK):
            a = values[start : start + _BLOCK].astype(np.float64)
            b = rhs_values[start : start + _BLOCK].astype(np.float64)
            if not np.isfinite(a).all() or not np.isfinite(b).all():
                # Equal infinities, as in masks, are neither a difference nor signal.
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

    def compute_difference(self, name: str) -> Difference:
        """Return the difference computed from the sums."""
        nsr = self.noise / self.signal if self.signal else MAX_NSR if self.noise else 0.0
        nsr = MAX_NSR if self.broken else min(nsr, MAX_NSR)
        sizes = math.sqrt(self.signal) * math.sqrt(self.other)
        cosine = min(1.0, self.product / sizes) if sizes else 0.0
        return Difference(
            name,
            nsr_to_decibels(nsr),
            cosine if self.noise else 1.0,
            math.inf if self.broken else self.max_abs_error,
        )


def compare_models(
    a: AnyModel, b: AnyModel, batches: Iterable[Any], rescaled: frozenset[str] = frozenset()
) -> Comparison:
    """Run two models on the same batches; compare their outputs and the results of their ops.

    Args:
        a: the reference, e.g. the FP32 model.
        b: the compared model, e.g. the converted one.
        batches: inputs; iterated once.
        rescaled: ops whose results one of the models scales and compensates later; not compared.

    Raises:
        ComparisonError: the models are not of one origin.
    """
    run = _Run.from_models(a, b, rescaled)
    for inputs in batches:
        run.run_batch(inputs)
    return run.build_comparison()


@dataclass
class _Run:
    """A comparison in progress; `graph` is that of the model with more of its ops."""

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
    def from_models(cls, a: AnyModel, b: AnyModel, rescaled: frozenset[str]) -> _Run:
        """Return a comparison of the ops that both models have."""
        if _find_source_framework(a) != _find_source_framework(b):
            raise ComparisonError(
                f"both models must be of one framework, got {_find_source_framework(a)} (A) and "
                f"{_find_source_framework(b)} (B); {_SAME_ORIGIN}"
            )
        lhs, rhs = a.observable_ops, b.observable_ops
        ops = [op for op in lhs if op.name in rhs]
        in_one_runtime = a.adaptor.framework == b.adaptor.framework
        if in_one_runtime and (2 * len(ops) < min(len(lhs), len(rhs)) or not ops):
            raise ComparisonError(
                f"the models have {format_count(len(ops), 'op')} in common: A has "
                f"{_format_first_names(lhs)}, B has {_format_first_names(rhs)}; {_SAME_ORIGIN}"
            )
        compared = {op.name: op for op in ops if op.name not in rescaled}
        left_out = {
            "are fused into another op in B": _list_missing_ops(lhs, rhs),
            "are fused into another op in A": _list_missing_ops(rhs, lhs),
            "are rescaled by a correction": tuple(op.name for op in ops if op.name in rescaled),
        }
        whole = lhs if len(lhs) >= len(rhs) else rhs
        return cls(a, b, whole, left_out, ChunkedOutputs(a, b, list(compared)))

    def run_batch(self, inputs: object) -> None:
        """Run one batch."""
        self.batches += 1
        self.samples += batch_size_of(inputs)
        self._take_outputs(*(named_float_arrays(model(inputs)) for model in (self.a, self.b)))
        in_one_runtime = self.a.adaptor.framework == self.b.adaptor.framework
        for op, lhs, rhs in self.groups.iterate_values(inputs):
            aligned = rhs.real if in_one_runtime else _laid_out_like(lhs.real, rhs.real)
            if lhs.real.shape != aligned.shape:
                raise ComparisonError(
                    f"the result of op {op!r} must have the same shape in both models, got "
                    f"{list(lhs.real.shape)} (A) and {list(rhs.real.shape)} (B); {_SAME_ORIGIN}"
                )
            self.layers.setdefault(op, _Sums()).add_batch(lhs.real, aligned)
            self.dtypes[op] = lhs.stored, rhs.stored

    def _take_outputs(self, lhs: Mapping[str, Array], rhs: Mapping[str, Array]) -> None:
        # By position: a saved and reloaded model may rename its outputs.
        shapes, theirs = ([list(a.shape) for a in output.values()] for output in (lhs, rhs))
        if shapes != theirs:
            raise ComparisonError(
                f"the outputs of both models must have the same shapes, got {shapes} (A) and "
                f"{theirs} (B); {_SAME_ORIGIN}"
            )
        for name, output in zip(lhs, rhs.values(), strict=True):
            self.outputs.setdefault(name, _Sums()).add_batch(lhs[name], output)

    def build_comparison(self) -> Comparison:
        """Return the result."""
        differences = {op: sums.compute_difference(op) for op, sums in self.layers.items()}
        # Skip ops that were not compared: an op's inputs are the nearest compared ops.
        graph = self.graph.with_only({op.name: op for op in self.graph if op.name in differences})
        covered = {*differences, *(name for names in self.left_out.values() for name in names)}
        silent = tuple(op.name for op in self.graph if op.name not in covered)
        left_out = {**self.left_out, "have no floating-point results, or did not run": silent}
        fused = _group_fused_ops(self.graph, differences)
        layers = tuple(
            self._make_layer_difference(op, differences, fused.get(op.name, ())) for op in graph
        )
        clear = [layer for layer in layers if layer.sqnr_drop >= MIN_DROP_DB]
        low = (layer for layer in clear if layer.sqnr < MIN_SQNR_DB)
        first = next(low, max(clear, key=lambda layer: layer.sqnr_drop, default=None))
        return Comparison(
            tuple(sums.compute_difference(name) for name, sums in self.outputs.items()),
            layers,
            first,
            {reason: names for reason, names in left_out.items() if names},
            self.batches,
            self.samples,
        )

    def _make_layer_difference(
        self, op: Op, differences: Mapping[str, Difference], fused: Iterable[Op]
    ) -> LayerDifference:
        own = differences[op.name]
        sources = [differences[name] for name in op.inputs if name in differences]
        lowest = min((min(source.sqnr, EQUAL) for source in sources), default=EQUAL)
        return LayerDifference(
            **asdict(own),
            type=op.type,
            fused_ops=tuple((part.name, part.type) for part in fused),
            inputs=op.inputs,
            dtypes=self.dtypes[op.name],
            sqnr_drop=lowest - min(own.sqnr, EQUAL),
            introduced_nsr=max(
                0.0, own.noise - max((source.noise for source in sources), default=0.0)
            ),
        )


def _laid_out_like(lhs: Array, rhs: Array) -> Array:
    """Return an array of B with the channels where A has them: some runtimes move this axis.

    If several layouts have the shape of A, the one with the nearest values counts.
    """
    if rhs.ndim < 3:
        return rhs
    layouts = (rhs, np.moveaxis(rhs, 1, -1), np.moveaxis(rhs, -1, 1))
    fitting = [layout for layout in layouts if layout.shape == lhs.shape]
    if len(fitting) < 2:
        return fitting[0] if fitting else rhs
    return min(fitting, key=lambda layout: float(np.nansum(np.square(layout - lhs))))


def _group_fused_ops(graph: OpGraph, compared: Collection[str]) -> dict[str, list[Op]]:
    """Return compared op → preceding ops that were not compared and lead to this op only."""
    last: dict[str, str] = {}
    for op in reversed(tuple(graph)):
        readers = graph.consumer_names(op.name)
        reached = {name if name in compared else last.get(name, "") for name in readers}
        if len(reached) == 1:
            last[op.name] = reached.pop()
    fused: dict[str, list[Op]] = {}
    for op in graph:
        if op.name not in compared and last.get(op.name):
            fused.setdefault(last[op.name], []).append(op)
    return fused


def _find_source_framework(model: AnyModel) -> str:
    """Return the framework that a model comes from; in another runtime, names may be lost."""
    return model.adaptor.framework if model.boundary is None else model.boundary.framework


def _list_missing_ops(lhs: OpGraph, rhs: OpGraph) -> tuple[str, ...]:
    return tuple(op.name for op in lhs if op.name not in rhs)


def _format_first_names(ops: Iterable[Op]) -> str:
    shown = [repr(op.name) for op in islice(ops, 3)]
    return ", ".join(shown) + ", …" if shown else "none"


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

    def iterate_values(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """Yield the outputs of the ops in both models, for one batch."""
        samples = batch_size_of(inputs)
        if not self._samples:
            yield from self._measure_chunks(inputs)
        else:
            if samples > self._samples or not self._groups:
                self._divide_into_chunks(samples)
            for group in self._groups:
                yield from self._run_group(group, inputs)
        self._samples = max(self._samples, samples)

    def _measure_chunks(self, inputs: object) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        """Yield all outputs, in chunks that fit if no op exceeds the largest output so far."""
        start, count = 0, _AT_FIRST
        while start < len(self._ops):
            group = tuple(self._ops[start : start + count])
            for op, reference, output in self._run_group(group, inputs):
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

    def _run_group(
        self, group: tuple[str, ...], inputs: object
    ) -> Iterator[tuple[str, OpOutput, OpOutput]]:
        first, second = self._make_output_functions(group)
        values = dict(first(inputs))
        second_values = dict(second(inputs))
        for op in group:
            if op in values and op in second_values:
                yield op, values.pop(op), second_values.pop(op)

    def _make_output_functions(self, group: tuple[str, ...]) -> tuple[_Values, _Values]:
        if group not in self._made:
            weights = sum(model.size for model in self._models)
            if (len(self._made) + 1) * weights > KEPT_BYTES or not self._groups:
                self._made.clear()
            a, b = self._models
            self._made[group] = a.make_op_outputs(group), b.make_op_outputs(group)
        return self._made[group]


#: Samples are enough for the noise of whole tensors.
_SAMPLES = 64


def measure_stage_noise(
    job: TuningJob,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    log: RunLog,
    trained: AnyModel | None = None,
) -> StageNoise | None:
    """Return the noise of a plan's results at each stage of its weights.

    `model` is the calibrated FP32 model, `trained` the converted model after training, if any. None
    with one stage only, without calibration data, or if the framework does not expose results of
    single ops.
    """
    # Without learned weights, and without the bias learned with them.
    nearest = without_reconstruction(plan.plan, (*RECONSTRUCTIONS, "bias_correction"))
    is_reconstructed = nearest != plan.plan
    has_stages = is_reconstructed or trained is not None
    if not has_stages or job.calibration is None or model.adaptor.op_outputs is None:
        return None
    with log.time_phase("compare", "Comparing with FP32"):
        models = {Stage.NEAREST: model.convert_by_plan(job.space.resolve(nearest))}
        if is_reconstructed:
            models[Stage.RECONSTRUCTED] = model.convert_by_plan(plan)
        if trained is not None:
            models[Stage.TRAINED] = trained
        few = replace(job.calibration, samples=min(job.calibration.samples, _SAMPLES))
        rescaled = model.find_rescaled_ops(plan.plan)
        comparisons = {
            stage: compare_models(job.model, staged, few.iterate_inputs(), rescaled)
            for stage, staged in models.items()
        }
    return _collect_stage_noise(plan, comparisons)


def _collect_stage_noise(plan: ResolvedPlan, comparisons: dict[Stage, Comparison]) -> StageNoise:
    by_stage = {stage.value: _nsr_by_op(comparison) for stage, comparison in comparisons.items()}
    outputs = {
        stage.value: max((output.noise for output in comparison.outputs), default=0.0)
        for stage, comparison in comparisons.items()
    }
    ops = {
        op: {stage: noise[op] for stage, noise in by_stage.items() if op in noise}
        for op in plan.plan
    }
    samples = min(comparison.samples for comparison in comparisons.values())
    return StageNoise({op: by for op, by in ops.items() if by}, outputs, samples)


def _nsr_by_op(comparison: Comparison) -> dict[str, float]:
    return {
        name: layer.noise
        for layer in comparison.layers
        for name in (layer.name, *(fused for fused, _ in layer.fused_ops))
    }
