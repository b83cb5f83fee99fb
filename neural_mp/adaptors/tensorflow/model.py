"""`TensorFlowModel`, the representation of a model, with its callable module and op graph."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signatures.input_spec import in_parts
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.tensorflow.graph.constants import tie_loop_constants
from neural_mp.adaptors.tensorflow.graph.fusion import GraphStructure, graph_structure
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, compile_runner, import_graph
from neural_mp.adaptors.tensorflow.graph.shape_inference import Shapes, infer_shapes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    LARGE,
    Array,
    GraphDef,
    NodeDef,
    TensorGraph,
    count_constant_bytes,
    count_constant_elements,
    get_node_name,
    indexed_name,
    list_data_inputs,
    list_result_dtypes,
    replace_constants,
)
from neural_mp.core.graph import MIN_CONSTANT_ELEMENTS, Layer, Op, OpGraph
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.errors import DataError, make_pickling_error

logger = logging.getLogger(__name__)

#: Element type → precision.
PRECISIONS = {
    tf.float32: Precision.FP32,
    tf.float64: Precision.FP32,
    tf.bfloat16: Precision.BF16,
    tf.float16: Precision.FP16,
}
#: Signature that TensorFlow Serving calls by default.
DEFAULT_KEY = "serving_default"


@dataclass(frozen=True)
class ServedSignature(Signature):
    """Inputs and outputs of a TensorFlow model.

    Attributes:
        keys: names of the signature in a SavedModel.
    """

    keys: tuple[str, ...] = (DEFAULT_KEY,)

    def bind_inputs(self, inputs: object) -> dict[str, Array]:
        """Return tensor → array for one batch; as in a TensorFlow session, integers may be floats.

        Raises:
            DataError: the number, names, dtypes or shapes do not match the model, or floats are
                outside the range of an integer input.
        """
        try:
            return super().bind_inputs(inputs)
        except DataError:
            values = self.assign_inputs(inputs)
            cast = [_floats_to_integers(*pair) for pair in zip(self.inputs, values, strict=True)]
            if all(new is old for new, old in zip(cast, values, strict=True)):
                raise
        feeds = super().bind_inputs(tuple(cast))
        if not self._dtype_warnings:
            logger.warning("batches hold floats for integer inputs of the model; they are cast")
            self._dtype_warnings.append(True)
        return feeds

    def with_defaults(self, defaults: Mapping[str, Array]) -> ServedSignature:
        """Return the signature with input → default for some of its inputs."""
        inputs = (replace(port, default=defaults.get(port.name)) for port in self.inputs)
        return replace(self, inputs=tuple(inputs))

    @cached_property
    def _dtype_warnings(self) -> list[bool]:
        return []


def _floats_to_integers(port: TensorSpec, value: object) -> Any:
    """Return floats for an integer input as integers if in range; any other value unchanged."""
    dtype = getattr(value, "dtype", None)
    if port.dtype is None or port.dtype.kind not in "iu" or getattr(dtype, "kind", "") != "f":
        return value
    limits, array = np.iinfo(port.dtype), np.asarray(value)
    in_range = array.size and limits.min <= array.min() and array.max() <= limits.max
    return array.astype(port.dtype) if in_range else value


@dataclass(frozen=True, eq=False)
class TensorFlowModel:
    """A self-contained graph: all weights are constants.

    Attributes:
        graph: nodes of the model.
        signature: inputs and outputs.
        example: tensor → array, inputs that the model can run on.
        ops: of a converted model, node that may run → the op of the original graph that its time
            counts for, if the names differ.
        original: the user's object, if the model is not converted.
        given: the graph as given, if `graph` is that graph re-declared in float32, or without fake
            quantization, and the model is not converted.
        source_ranges: node → the range that fake quantization in the given graph declares.
        warnings: messages for the user.
        counts: numbers of inserted conversions.
        layers: node → its Keras layers, if known.
        written: of a converted model, node → the op it implements, if the names differ; empty for
            a conversion that has the name of an op.
        results: of a converted model, op of the original graph → location of its result; without
            ops that are fused into another.
    """

    graph: TensorGraph
    signature: ServedSignature
    example: dict[str, Array]
    ops: dict[str, str]
    original: Any = None
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    layers: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)
    weight_scales: Mapping[str, Array] = field(default_factory=dict)
    given: TensorGraph | None = None
    source_ranges: Mapping[str, Range] = field(default_factory=dict)

    @property
    def source(self) -> TensorGraph:
        """Graph that the model runs and that is saved."""
        return self.graph if self.given is None else self.given

    @cached_property
    def as_given(self) -> TensorFlowModel:
        """The model with only the graph that it runs."""
        return self if self.given is None else replace(self, graph=self.given, given=None)

    @cached_property
    def runner(self) -> Runner:
        """Session with the fused graph, created on first use."""
        tables = {
            name: self.graph.constant_value(name)
            for name in self._list_gathered_constants(self._list_large_constants())
        }
        ports = self.signature.input_tensors, self.signature.output_tensors
        return compile_runner(self.graph, tables, *ports)

    @cached_property
    def module(self) -> ConvertedModel:
        """The module that users get for a converted model, created on first use."""
        return ConvertedModel(self.source, self.signature, self.signature.keys)

    def without_weights(self) -> tuple[tf.Graph, dict[str, Array]]:
        """Return the graph with placeholders for large constants, and their values."""
        values = {name: self.graph.constant_value(name) for name in self._list_large_constants()}
        return import_graph(replace_constants(self.graph, values)), values

    def _list_large_constants(self) -> list[str]:
        # Constants tied to an iteration of a loop cannot be fed.
        return [
            name
            for name, node in self.graph.nodes.items()
            if count_constant_bytes(node) > LARGE and not node.input
        ]

    def _list_gathered_constants(self, constants: Iterable[str]) -> list[str]:
        """Return constants read only by rows: making them constant speeds up no kernel."""
        uses: dict[str, set[bool]] = {}
        for node in self.graph.nodes.values():
            for position, tensor in enumerate(node.input):
                uses.setdefault(tensor, set()).add(
                    get_op_role(node) is Role.GATHER and position == 0
                )
        outputs = self.output_nodes
        return [name for name in constants if uses.get(name) == {True} and name not in outputs]

    @cached_property
    def shapes(self) -> Shapes:
        """Node → shapes of its results."""
        return infer_shapes(self.graph)

    @cached_property
    def structure(self) -> GraphStructure:
        """Structure of the graph."""
        return graph_structure(self.graph, self.output_nodes, self.shapes)

    @cached_property
    def counted_for(self) -> Mapping[str, str]:
        """Node that may run → the op its time counts for, e.g. the layer it is fused into."""
        return self.ops or self.structure.layer_of

    @cached_property
    def op_nodes(self) -> tuple[NodeDef, ...]:
        """Nodes that compute something."""
        fed = {get_node_name(tensor) for tensor in self.signature.input_tensors}
        return tuple(
            node
            for name, node in self.graph.nodes.items()
            if node.op != CONSTANT and get_op_role(node) is not Role.NOTHING and name not in fed
        )

    @property
    def output_nodes(self) -> frozenset[str]:
        """Nodes of the graph's outputs."""
        return frozenset(map(get_node_name, self.signature.output_tensors))

    def with_graph(self, graph: TensorGraph, **changes: Any) -> TensorFlowModel:
        """Return the model with another graph, without unused nodes, and other changes."""
        signature = self.signature
        graph = graph.prune_unused(signature.output_tensors, signature.input_tensors)
        tie_loop_constants(graph)
        return replace(self, graph=graph, original=None, given=None, **changes)

    def run(self, feeds: dict[str, Array]) -> list[Any]:
        """Return the outputs in the order of the signature."""
        return self.as_given.runner(feeds, self.signature.output_tensors)


class ConvertedModel(tf.Module):
    """A frozen graph that can be called like its original and saved by `tf.saved_model.save`.

    Args:
        graph: the graph.
        signature: names, tensors and types of the inputs and outputs.
        keys: names of the signature in a SavedModel.

    Attributes:
        graph_def: the graph.
        signature: names, tensors and types of the inputs and outputs.
        serving_signatures: function for TensorFlow Serving, with the names of the signature; the
            argument `signatures` of `tf.saved_model.save`.
    """

    def __init__(self, graph: TensorGraph, signature: Signature, keys: Iterable[str]) -> None:
        super().__init__(name="converted")
        self.graph_def: GraphDef = graph.to_graph_def()
        self.signature = signature
        ports = signature.inputs
        specs = [tf.TensorSpec(port.shape, port.dtype, name=port.name) for port in ports]
        fetched = list(map(indexed_name, signature.output_tensors))

        def run_graph(*values: tf.Tensor) -> dict[str, tf.Tensor]:
            fed = dict(zip(map(indexed_name, signature.input_tensors), values, strict=True))
            results = tf.graph_util.import_graph_def(
                self.graph_def, input_map=fed, return_elements=fetched, name=""
            )
            names = [port.name for port in signature.outputs]
            return dict(zip(names, results, strict=True))

        # A tf.function would tie the outputs to every op with a side effect, loops written as
        # dataflow included. A wrapped function alone cannot be saved.
        wrapped = tf.compat.v1.wrap_function(run_graph, specs)
        self._run = tf.function(
            lambda *values: wrapped(*values), input_signature=specs, autograph=False
        )
        function = self._run.get_concrete_function()
        self.serving_signatures = dict.fromkeys(keys, function)

    def __copy__(self) -> ConvertedModel:
        return self  # no call changes the model

    def __deepcopy__(self, memo: dict[int, Any]) -> ConvertedModel:
        return self

    def __reduce__(self) -> Any:
        raise make_pickling_error("a converted model")

    @property
    def signatures(self) -> Mapping[str, Any]:
        """The functions of a loaded SavedModel by name: `signatures["serving_default"]`."""
        return self.serving_signatures

    def __call__(self, *args: object, training: bool = False, **kwargs: object) -> Any:
        """Run one batch, given by position, by name, or as one dict or list; return tensors."""
        if training:
            raise ValueError("a converted model cannot be trained; train the original model")
        inputs = kwargs or (args[0] if len(args) == 1 else list(args))
        assigned = self.signature.assign_inputs(inputs)
        if not any(tf.is_tensor(value) for value in assigned):
            assigned = list(self.signature.bind_inputs(inputs).values())
        values = [
            tf.cast(value, port.dtype) if tf.is_tensor(value) else tf.constant(value, port.dtype)
            for value, port in zip(assigned, self.signature.inputs, strict=True)
        ]
        results = self._run(*values)
        return self.signature.pack_outputs([results[port.name] for port in self.signature.outputs])

    def predict(self, x: object, batch_size: int = 32, **_: object) -> Any:
        """Return the outputs for all of `x` as arrays, in batches, as Keras models do."""
        feeds = self.signature.bind_inputs(x)
        split = {
            port.tensor: feeds[port.tensor]
            for port in self.signature.inputs
            if feeds[port.tensor] is not port.default and np.ndim(feeds[port.tensor])
        }
        size = len(next(iter(split.values())))
        parts = [
            tf.nest.map_structure(np.asarray, self(*(feeds | part).values()))
            for part in in_parts(split, size, batch_size)
        ]
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    def predict_on_batch(self, x: object) -> Any:
        """Return the outputs for one batch as arrays, as Keras models do."""
        return tf.nest.map_structure(np.asarray, self(x))


def build_graph(model: TensorFlowModel) -> OpGraph:
    """Return the graph of all ops that compute something."""
    fusion_group_of = model.structure.layer_of
    fed = list(map(get_node_name, model.signature.input_tensors))
    names = {*fed, *(node.name for node in model.op_nodes)}
    ops = []
    for node in model.op_nodes:
        sources = (get_node_name(tensor) for tensor in list_data_inputs(node))
        ops.append(
            Op(
                node.name,
                node.op,
                tuple(source for source in sources if source in names),
                fusion_group=fusion_group_of.get(node.name),
                quantize_agnostic=node.name in model.structure.agnostic_ops,
                writes_int8=node.op in LAYERS
                and not LAYERS[node.op].is_dense,  # whose integer kernel cannot write floats
                weights=sum(map(count_constant_elements, model.graph.list_node_constants(node))),
                constants=tuple(
                    constant.name
                    for constant in model.graph.list_node_constants(node)
                    if count_constant_elements(constant) >= MIN_CONSTANT_ELEMENTS
                ),
                layers=model.layers.get(node.name, ()),
                shape=next(iter(model.shapes.fixed.get(node.name, ())), None),
                source_precision=_find_source_precision(model, node),
                widened=model.given is not None,
            )
        )
    return OpGraph(ops, fed, [name for name in model.output_nodes if name in names])


def _find_source_precision(model: TensorFlowModel, node: NodeDef) -> Precision:
    """Return the precision of an op in the graph as given, or of the op that it is a part of."""
    if model.given is not None:
        scopes = node.name.split("/")
        names = ("/".join(scopes[:end]) for end in range(len(scopes), 0, -1))
        node = next((model.given.nodes[name] for name in names if name in model.given), node)
    return PRECISIONS.get(next(iter(list_result_dtypes(node)), None), Precision.FP32)
