"""Framework-independent graph of a model: ops and data edges."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, ClassVar, NamedTuple

from neural_mp.core.precision import Precision, format_precision_name
from neural_mp.errors import UnknownOperatorError, did_you_mean
from neural_mp.util.json_fields import Count, JsonFields
from neural_mp.util.validators import string, tuple_of

#: Share of all weights from which a precision counts as one of the model's.
_MIN_SHARE = 0.01
#: Elements from which it matters whether a constant is stored once or twice.
MIN_CONSTANT_ELEMENTS = 1024


class Layer(NamedTuple):
    """A layer (module) of the user's model.

    Attributes:
        name: such as `layer4.0.conv1` (PyTorch) or `dense_1` (Keras).
        type: class name, such as `Conv2d` or `Dense`.
    """

    name: str
    type: str


_Layer = Annotated[Layer, lambda value: Layer(*tuple_of(string, string)(value))]


@dataclass(frozen=True)
class Op(JsonFields):
    """One operation.

    Attributes:
        name: unique in its graph; used in plans and messages.
        type: the framework's op type, such as `conv2d` or `MatMul`.
        inputs: names of the ops or graph inputs whose results the op reads, without constants.
        fusion_group: op whose INT8 kernel can run this op fused into it (bias, activation or
            residual addition after a convolution); None if no kernel can.
        quantize_agnostic: whether the op only moves or selects values, with equal results on
            quantized and float values (reshape, max pooling). With several inputs (concatenation),
            the inputs must share one scale.
        writes_int8: whether the op's INT8 kernel can write INT8 only, so that the result of the op
            (or of the last op of its fusion group) is quantized even without an INT8 consumer.
        joins_int8: whether the op's INT8 kernel pays off between INT8 ops only (addition, average
            pooling). The kernel runs if some input that it reads quantized is written in INT8 and
            the result (of the op, or of the last op of its fusion group) is read in INT8; or if
            kernels write all of these inputs in INT8: for other ops, because they write INT8 only,
            or because they may write INT8.
        may_write_int8: whether the op's INT8 kernel writes INT8 as fast as float or faster, so that
            an op that joins INT8 may request INT8, although no INT8 op reads its own result.
        quantized_inputs: inputs that the op's INT8 kernel reads quantized; empty for all inputs of
            an op that joins INT8, and for the first input of every other op.
        channel_scales: whether the op's INT8 kernel reads its input with a scale and zero point per
            channel (depthwise convolution).
        quantizes_terms: whether the INT8 kernel that this sum is fused into rounds both terms, also
            the one that it computes itself.
        weights: number of elements of all constants read.
        constants: names of the stored constants read with at least `MIN_CONSTANT_ELEMENTS`
            elements; equal names are one constant.
        layers: layers that contain the op, outermost first, including those of ops folded into the
            op (batch norm). Empty if the graph has no layer names.
        source_precision: precision in the original model: BF16 or FP16 if the model itself runs the
            op in 16 bits (autocast, half-precision weights), INT8 if the model itself is quantized.
            A plan's FP32 keeps this precision.
        widened: whether a plan with lower precisions runs the op in float32 instead of keeping
            `source_precision`.
        moves_integers: whether a target moves the integers of the op's inputs, whatever the plan
            says, if one of the inputs is in integers.
        shape: sizes of the first result, None for a free size; None if unknown.
    """

    omits_defaults: ClassVar[bool] = True

    name: str
    type: str
    inputs: tuple[str, ...] = ()
    fusion_group: str | None = None
    quantize_agnostic: bool = False
    writes_int8: bool = False
    joins_int8: bool = False
    may_write_int8: bool = False
    quantized_inputs: tuple[str, ...] = ()
    channel_scales: bool = False
    quantizes_terms: bool = False
    weights: Count = 0
    layers: tuple[_Layer, ...] = ()
    source_precision: Precision = Precision.FP32
    # None of these fields changes which plans exist: digests of spaces are of `repr`.
    widened: bool = field(default=False, repr=False)
    moves_integers: bool = field(default=False, repr=False)
    shape: tuple[Count | None, ...] | None = field(default=None, repr=False, compare=False)
    constants: tuple[str, ...] = field(default=(), repr=False, compare=False)

    @property
    def read_in_int8(self) -> tuple[str, ...]:
        """The inputs that the INT8 kernel of the op reads quantized."""
        if self.quantized_inputs:
            return self.quantized_inputs
        return self.inputs if self.joins_int8 else self.inputs[:1]

    @property
    def types(self) -> frozenset[str]:
        """The op type, and the classes of its layers."""
        return frozenset({self.type, *(layer.type for layer in self.layers)})


class OpGraph:
    """Ops in topological order with their producers and consumers.

    Graphs with cycles (loops) are allowed: ops on a cycle follow the others, in the order given.

    Args:
        ops: the operations, in any order; names must be unique.
        inputs: names of the input tensors.
        outputs: names of the ops whose results are outputs.

    Raises:
        UnknownOperatorError: two ops share a name, or an op reads an undefined name.
    """

    def __init__(
        self, ops: Iterable[Op], inputs: Sequence[str] = (), outputs: Sequence[str] = ()
    ) -> None:
        nodes = list(ops)
        self._by_name = {op.name: op for op in nodes}
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        if len(self._by_name) < len(nodes):
            twice = Counter(op.name for op in nodes).most_common(1)[0][0]
            raise UnknownOperatorError(f"two ops are named {twice!r}; op names must be unique")
        self._consumers: dict[str, list[str]] = {n: [] for n in (*self._by_name, *self.inputs)}
        for op in nodes:
            for source in dict.fromkeys(op.inputs):
                if source not in self._consumers:
                    raise UnknownOperatorError(
                        f"op {op.name!r} reads {source!r}, which is neither an op nor an input"
                        f"{did_you_mean(source, self._consumers)}"
                    )
                self._consumers[source].append(op.name)
        self._order = tuple(self._sort_topologically(nodes))

    def _sort_topologically(self, given: Sequence[Op]) -> Iterator[Op]:
        position = {op.name: index for index, op in enumerate(given)}
        waiting = {op.name: sum(s in position for s in dict.fromkeys(op.inputs)) for op in given}
        ready = [index for index, op in enumerate(given) if not waiting[op.name]]
        done = set()
        while ready:  # lowest position first: a sorted list keeps its order
            op = given[heapq.heappop(ready)]
            done.add(op.name)
            yield op
            for consumer in self._consumers[op.name]:
                waiting[consumer] -= 1
                if not waiting[consumer]:
                    heapq.heappush(ready, position[consumer])
        yield from (op for op in given if op.name not in done)

    def __iter__(self) -> Iterator[Op]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Op:
        try:
            return self._by_name[name]
        except KeyError:
            raise UnknownOperatorError(
                f"the model has no op {name!r}{did_you_mean(name, self._by_name)}"
            ) from None

    def producers(self, name: str) -> tuple[Op, ...]:
        """Return the ops whose results op `name` reads, without graph inputs."""
        return tuple(self._by_name[s] for s in self[name].inputs if s in self._by_name)

    def consumers(self, name: str) -> tuple[Op, ...]:
        """Return the ops that read the result of op, or graph input, `name`."""
        return tuple(self._by_name[consumer] for consumer in self.consumer_names(name))

    def consumer_names(self, name: str) -> Sequence[str]:
        """Return the names of `consumers`."""
        if name not in self._consumers:
            self[name]
        return self._consumers[name]

    def with_only(self, replacements: Mapping[str, Op]) -> OpGraph:
        """Return the graph of some ops, without outputs; ops read their nearest kept predecessors.

        The inputs of the replacements are ignored.
        """
        sources: dict[str, tuple[str, ...]] = {name: (name,) for name in self.inputs}
        ops = []
        for op in self:
            predecessors = (name for source in op.inputs for name in sources.get(source, ()))
            nearest = tuple(dict.fromkeys(predecessors))
            if op.name in replacements:
                ops.append(replace(replacements[op.name], inputs=nearest, quantized_inputs=()))
                nearest = (replacements[op.name].name,)
            sources[op.name] = nearest
        return OpGraph(ops, self.inputs)

    @cached_property
    def source_precisions(self) -> tuple[Precision, ...]:
        """The precisions in which the given model computes, the one with most weights first.

        Precisions of less than a hundredth of all weights are left out.
        """
        sums: Counter[Precision] = Counter()
        weighted = any(op.weights for op in self)
        for op in self:
            sums[op.source_precision] += op.weights if weighted else 1
        least = _MIN_SHARE * sums.total()
        return tuple(p for p, count in sums.most_common() if count >= least) or (Precision.FP32,)

    @property
    def source_name(self) -> str:
        """The precisions of the given model as one name, such as `FP32` or `FP16`."""
        return format_precision_name(self.source_precisions)

    def executed(self, effective: Mapping[str, Precision]) -> dict[str, Precision]:
        """Return op → the precision in which it is executed; FP32 keeps that of the given model.

        Ops that move integers have the widest integers among their inputs.
        """
        unchanged = all(precision is Precision.FP32 for precision in effective.values())
        executed: dict[str, Precision] = {}
        for op in self:
            precision = effective[op.name]
            if precision is Precision.FP32 and (unchanged or not op.widened):
                precision = op.source_precision
            sources = (executed.get(name, Precision.FP32) for name in op.inputs)
            moved = [source for source in sources if op.moves_integers and source.is_integer]
            executed[op.name] = max(moved, key=lambda p: p.bits, default=precision)
        return executed

    @cached_property
    def types(self) -> tuple[str, ...]:
        """The op types of the graph, sorted."""
        return tuple(sorted({op.type for op in self}))

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers of all ops, in order of first occurrence."""
        return tuple(dict.fromkeys(layer for op in self for layer in op.layers))
