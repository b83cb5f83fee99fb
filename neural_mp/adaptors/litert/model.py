"""The representation of a LiteRT model, its ops and the edges between them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import takewhile
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.named_graphs import GraphModel, Run
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.litert.graph.ports import decode_values, encode_values, read_encoding
from neural_mp.adaptors.litert.graph.program import Program, get_known_sizes
from neural_mp.adaptors.litert.ops import Role, get_op_row, has_role
from neural_mp.adaptors.litert.runtime import Runner
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Layer, Op, OpGraph
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision


@dataclass(frozen=True)
class Recipe:
    """A conversion by AI Edge Quantizer.

    Attributes:
        entries: the recipe, as the quantizer's own files hold it.
        ranges: tensor → its range, the quantizer's calibration result.
        limits: weight → largest magnitude of each channel, float32 with the axes of the weight, if
            not those of its values.
    """

    entries: list[dict[str, Any]]
    ranges: Mapping[str, Range]
    limits: Mapping[str, Array] = field(default_factory=dict)

    @property
    def statistics(self) -> dict[str, dict[str, Array]]:
        """The ranges as the quantizer reads them from files: in float64."""
        spans = {
            name: (np.array([[low]]), np.array([[high]]))
            for name, (low, high) in self.ranges.items()
        }
        wide = {name: np.asarray(limit, np.float64) for name, limit in self.limits.items()}
        spans.update({name: (-limit, limit) for name, limit in wide.items()})
        return {name: {"min": low, "max": high} for name, (low, high) in spans.items()}


@dataclass(frozen=True, eq=False)
class LiteRtModel(GraphModel[Program]):
    """A graph that LiteRT runs, with the signature in the order of the data.

    Attributes:
        recipe: for a converted model, the recipe and the ranges that AI Edge Quantizer alone needs
            to convert the float graph; None for others.
        weight_scales: op → scale of each channel of its weight in the next conversion.
    """

    recipe: Recipe | None = None
    weight_scales: Mapping[str, Array] = field(default_factory=dict)

    @cached_property
    def structure(self) -> Structure:
        """The structure of the graph."""
        return Structure(self.program)

    @cached_property
    def tensors(self) -> Mapping[str, int]:
        """Tensor of the main subgraph → position."""
        return self.structure.tensors

    def make_runner(self, fetched: Sequence[str], *, keeps_tensors: bool = False) -> Runner:
        """Return a runner of the planned graph that takes inputs in the order of the signature."""
        return Runner(
            self.program.content,
            [self.tensors[name] for name in self.signature.input_tensors],
            [self.tensors[name] for name in fetched],
            keeps_tensors,
        )

    @cached_property
    def encodings(self) -> Mapping[str, QuantParams]:
        """Tensor of an input or output that callers know in float, and the graph in INT8."""
        ports = (*self.signature.inputs, *self.signature.outputs)
        tensors = {
            port.tensor: self.program.main.tensors[self.tensors[port.tensor]]
            for port in ports
            if port.dtype == np.float32
        }
        encodings = {name: read_encoding(tensor) for name, tensor in tensors.items()}
        return {name: encoding for name, encoding in encodings.items() if encoding is not None}

    def make_feed(self, bound: Mapping[str, Array], name: str) -> Array:
        """Return the values of an input as the graph takes them."""
        encoding = self.encodings.get(name)
        return bound[name] if encoding is None else encode_values(bound[name], encoding)

    def order_feeds(self, bound: Mapping[str, Array]) -> list[Array]:
        """Return bound inputs in the order of the signature."""
        return [self.make_feed(bound, name) for name in self.signature.input_tensors]

    def compile_graph(self) -> Run:
        """Return the graph to run, for the allowed number of threads."""
        names = self.signature.output_tensors
        runner, encodings = self.make_runner(names), [self.encodings.get(name) for name in names]
        return lambda bound: [
            result if encoding is None else decode_values(result, encoding)
            for result, encoding in zip(runner(self.order_feeds(bound)), encodings, strict=True)
        ]

    def __reduce__(self) -> tuple[Callable[..., LiteRtModel], tuple[Any, ...]]:
        """Return the parts for pickling: the graph as its file."""
        rest = {part.name: getattr(self, part.name) for part in fields(self)}
        content, original = rest.pop("program").content, rest.pop("given")
        return _unpickle_model, (content, original is None, {**rest, "_runners": {}})


def _unpickle_model(content: bytes, is_converted: bool, rest: dict[str, Any]) -> LiteRtModel:
    program = Program.parse(content)
    return LiteRtModel(program, given=None if is_converted else program, **rest)


class Structure:
    """The ops of the main subgraph by name, and the tensors that they read and write.

    An op has the name of its first result; its further results follow as parts, if they are read.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tensors = {
            program.tensor_name(index): index for index in range(len(program.main.tensors))
        }
        self.ops: dict[str, Any] = {}
        #: Further result → the op that writes the result.
        self.parts: dict[str, str] = {}
        self.read = program.list_read_tensors()
        for op in program.iterate_ops():
            if not len(op.outputs):  # an op that changes a variable
                continue
            name, further = program.op_name(op), map(int, op.outputs[1:])
            self.ops[name] = op
            self.parts.update({program.tensor_name(i): name for i in further if i in self.read})

    def get_type(self, name: str) -> str:
        """Return the type of an op."""
        return self.program.op_type(self.ops[name])

    def get_scope(self, name: str) -> str:
        """Return the names of the results of an op, each followed by a semicolon."""
        return "".join(f"{self.program.tensor_name(index)};" for index in self.ops[name].outputs)

    def list_computed_inputs(self, name: str) -> list[int]:
        """Return the positions of the tensors that an op reads and others, or callers, write."""
        indices = (int(index) for index in self.ops[name].inputs)
        return [index for index in indices if index >= 0 and not self.program.is_constant(index)]

    def list_constants(self, name: str) -> list[int]:
        """Return the positions of the constants that an op reads."""
        indices = (int(index) for index in self.ops[name].inputs)
        return [index for index in indices if index >= 0 and self.program.is_constant(index)]

    def iterate_float_tensors(self, name: str) -> Iterator[int]:
        """Yield the positions of the float tensors that an op reads or writes, no constants."""
        for index in (*self.list_computed_inputs(name), *map(int, self.ops[name].outputs)):
            if self.program.is_float(index):
                yield index

    def is_float_op(self, name: str) -> bool:
        """Whether the first result of an op is float."""
        return self.program.is_float(int(self.ops[name].outputs[0]))

    def keeps_floats(self, name: str) -> bool:
        """Whether a run can return the values of a tensor, and these are float.

        LiteRT allocates no memory for a result that nobody reads.
        """
        index = self.tensors[name]
        return index in self.read and self.program.is_float(index)

    def has_weight(self, name: str) -> bool:
        """Whether an op is a layer, or a table, with a constant float weight."""
        row = get_op_row(self.get_type(name))
        if not row.role & (Role.LAYER | Role.TABLE):
            return False
        weight = self.find_weight(name)
        return self.program.is_constant(weight) and self.program.is_float(weight)

    def has_table(self, name: str) -> bool:
        """Whether an op reads rows of a constant float table."""
        return has_role(self.get_type(name), Role.TABLE) and self.has_weight(name)

    def get_weight(self, name: str) -> Array:
        """Return the weight of an op with one."""
        weight = self.program.get_constant(self.find_weight(name))
        assert weight is not None
        return weight

    def find_weight(self, name: str) -> int:
        """Return the position of the weight of an op with one."""
        return int(self.ops[name].inputs[get_op_row(self.get_type(name)).weight])

    def find_bias(self, name: str) -> int | None:
        """Return the position of the constant that a layer adds; None if it adds none."""
        row, inputs = get_op_row(self.get_type(name)), self.ops[name].inputs
        index = int(inputs[row.bias]) if len(inputs) > row.bias else -1
        return index if index >= 0 and self.program.is_constant(index) else None


def build_graph(model: LiteRtModel) -> OpGraph:
    """Return every op with its edges; further results follow as ops."""
    structure, program = model.structure, model.program
    counted: set[int] = set()
    ops = []
    for name, op in structure.ops.items():
        kind = structure.get_type(name)
        computed = structure.list_computed_inputs(name)
        floats = [program.tensor_name(index) for index in computed if program.is_float(index)]
        # A constant that several ops read counts once.
        constants = [index for index in structure.list_constants(name) if index not in counted]
        counted.update(constants)
        sizes = {index: _count_elements(program, index) for index in constants}
        labels = map(program.tensor_name, (*structure.list_constants(name), *op.outputs))
        quantized, moves = structure.is_float_op(name), is_moving(structure, name)
        # Sizes, which move no values, are computed in graphs with a free batch size.
        read = floats if moves else [program.tensor_name(index) for index in computed]
        ops.append(
            Op(
                name,
                kind,
                tuple(dict.fromkeys(read)),
                quantize_agnostic=moves,
                # Integer kernels write INT8 only.
                writes_int8=quantized and has_role(kind, Role.LAYER | Role.PRODUCT),
                joins_int8=quantized and has_role(kind, Role.JOINING),
                quantized_inputs=tuple(dict.fromkeys(floats)),
                weights=sum(sizes.values()),
                constants=tuple(
                    program.tensor_name(index)
                    for index, size in sizes.items()
                    if size >= MIN_CONSTANT_ELEMENTS
                ),
                layers=tuple(dict.fromkeys(_parse_layers(labels, kind))),
                source_precision=_find_source_precision(program, op),
                shape=get_known_sizes(program.main.tensors[op.outputs[0]]),
            )
        )
    for part, name in structure.parts.items():
        moved = is_moving(structure, name)
        ops.append(Op(part, structure.get_type(name), (name,), quantize_agnostic=moved))
    inputs = model.signature.input_tensors
    outputs = [tensor for tensor in model.signature.output_tensors if tensor not in inputs]
    return OpGraph(ops, inputs, outputs)


def is_moving(structure: Structure, name: str) -> bool:
    """Whether an op moves values that others compute."""
    moves = has_role(structure.get_type(name), Role.MOVING) and structure.is_float_op(name)
    return moves and all(
        not structure.program.is_float(index) for index in structure.list_constants(name)
    )


def _count_elements(program: Program, index: int) -> int:
    tensor = program.main.tensors[index]
    if tensor.type not in (schema.TensorType.FLOAT32, schema.TensorType.FLOAT16):
        return 0
    return math.prod(size or 1 for size in get_known_sizes(tensor))


def _find_source_precision(program: Program, op: Any) -> Precision:
    """Return INT8 if an op of the given file computes in 8 bits, else FP32."""
    tensors = (program.main.tensors[index] for index in (*op.inputs, *op.outputs) if index >= 0)
    return Precision.INT8 if any(map(is_quantized, tensors)) else Precision.FP32


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor (`TensorT`) holds numbers of 8 bits with a scale."""
    scales = None if tensor.quantization is None else tensor.quantization.scale
    return tensor.type in (schema.TensorType.INT8, schema.TensorType.UINT8) and scales is not None


#: Number that Keras 3 appends to the name of a model and of a layer for each of their calls, but
#: not to scopes of ops within a layer.
_CALL = re.compile(r"_\d+$")


def _parse_layers(names: Iterable[str], kind: str) -> Iterator[Layer]:
    """Yield the Keras layers in the names of a result and of the constants of its op.

    Such a name is `functional_1/conv_1/Relu;functional_1/conv_1/convolution`: the paths of all
    folded ops. The op type stands for the type of the innermost layer.
    """
    for path in (path.split("/") for name in names for path in name.split(";")):
        layers = path[1:-1]
        if _CALL.search(path[0]):
            layers = [_CALL.sub("", part) for part in takewhile(_CALL.search, layers)]
        for depth, layer in enumerate(layers):
            yield Layer(layer, kind if depth == len(layers) - 1 else "Layer")
