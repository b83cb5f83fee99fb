"""`TensorGraph`, a TensorFlow graph as a mapping of nodes that is cheap to copy and edit."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework.attr_value_pb2 import AttrValue
from tensorflow.core.framework.function_pb2 import FunctionDefLibrary
from tensorflow.core.framework.graph_pb2 import GraphDef
from tensorflow.core.framework.node_def_pb2 import NodeDef
from tensorflow.core.framework.tensor_pb2 import TensorProto
from tensorflow.core.framework.versions_pb2 import VersionDef
from tensorflow.python.framework import op_def_registry, tensor_util

from neural_mp.adaptors.common.naming import unique_name
from neural_mp.adaptors.common.signatures.signature import Shape

Array = NDArray[Any]

#: Node → its readers, each with the input position.
Consumers = Mapping[str, Sequence[tuple[str, int]]]

#: Op type that holds a value.
CONSTANT = "Const"
#: Constants with more bytes are kept out of code that copies a graph many times.
LARGE = 1 << 15
#: Quantized types, which numpy lacks → the type of their values.
_STORED_AS = {tf.qint8: np.int8, tf.quint8: np.uint8, tf.qint32: np.int32}


def get_node_name(tensor: str) -> str:
    """Return the node that a tensor (`name`, `name:1`) or control input (`^name`) belongs to."""
    return tensor.removeprefix("^").split(":")[0]


def is_control(tensor: str) -> bool:
    """Whether an input is a control input, which only orders execution."""
    return tensor.startswith("^")


def get_output_index(tensor: str) -> int:
    """Return the index of a tensor among the results of its node."""
    _, _, index = tensor.partition(":")
    return int(index or 0)


def plain_name(tensor: str) -> str:
    """Return the canonical name of a tensor: without `:0`."""
    return tensor.removesuffix(":0")


def indexed_name(tensor: str) -> str:
    """Return the name of a tensor with `:0`, as sessions and imports need."""
    return tensor if ":" in tensor else f"{tensor}:0"


def list_data_inputs(node: NodeDef) -> list[str]:
    """Return the tensors a node reads, without control inputs."""
    return [plain_name(tensor) for tensor in node.input if not is_control(tensor)]


def copy_node(node: NodeDef, name: str | None = None) -> NodeDef:
    """Return a copy of a node for editing, with a new name if one is given."""
    copy = NodeDef()
    copy.CopyFrom(node)
    copy.name = name or node.name
    return copy


def make_node(op: str, name: str, inputs: Sequence[str] = (), **attributes: object) -> NodeDef:
    """Return a node with attributes from Python values, `tf.DType`s and `tf.TensorShape`s."""
    node = NodeDef(op=op, name=name, input=list(inputs))
    for key, value in attributes.items():
        _set_attribute(node.attr[key], value)
    return node


def _set_attribute(attribute: AttrValue, value: object) -> None:
    if isinstance(value, list | tuple):
        attribute.list.SetInParent()
        for item in value:
            if isinstance(item, tf.DType):
                attribute.list.type.append(item.as_datatype_enum)
            elif isinstance(item, str):
                attribute.list.s.append(item.encode())
            else:
                attribute.list.i.append(int(item))
    elif isinstance(value, tf.DType):
        attribute.type = value.as_datatype_enum
    elif isinstance(value, tf.TensorShape):
        attribute.shape.CopyFrom(value.as_proto())
    elif isinstance(value, bool):
        attribute.b = value
    elif isinstance(value, int):
        attribute.i = value
    elif isinstance(value, float):
        attribute.f = value
    elif isinstance(value, str):
        attribute.s = value.encode()
    else:
        attribute.CopyFrom(value)


def make_constant(name: str, value: object, dtype: tf.DType | None = None) -> NodeDef:
    """Return a constant; `dtype` is needed for quantized types, which numpy does not have."""
    if dtype is not None and dtype in _STORED_AS:
        stored = np.ascontiguousarray(value, _STORED_AS[dtype])
        proto = TensorProto(dtype=dtype.as_datatype_enum, tensor_content=stored.tobytes())
        for size in stored.shape:
            proto.tensor_shape.dim.add().size = size
    else:
        proto = tensor_util.make_tensor_proto(value, dtype=dtype)
    node = NodeDef(op=CONSTANT, name=name)
    node.attr["dtype"].type = proto.dtype
    node.attr["value"].tensor.CopyFrom(proto)
    return node


def get_dtype_attribute(node: NodeDef) -> tf.DType | None:
    """Return the element type a node computes in; None if there is none."""
    # Some ops have a list of types in this attribute.
    if "T" not in node.attr or not node.attr["T"].type:
        return None
    return tf.as_dtype(node.attr["T"].type)


def get_text_attribute(node: NodeDef, key: str) -> str:
    """Return a string attribute; empty if unset."""
    return node.attr[key].s.decode(errors="replace") if key in node.attr else ""


def channels_first(node: NodeDef) -> bool:
    """Whether an image op has the channels before height and width."""
    return get_text_attribute(node, "data_format").startswith("NC")


def get_integers_attribute(node: NodeDef, key: str) -> list[int]:
    """Return a list of integers; empty if unset."""
    return list(node.attr[key].list.i) if key in node.attr else []


def find_typed_inputs(node: NodeDef) -> list[int]:
    """Return the positions of the inputs of the element type that a node computes in."""
    types = _list_argument_types(node, "input_arg")
    return [position for position, (attribute, _) in enumerate(types) if attribute == "T"]


def has_typed_results(node: NodeDef) -> bool:
    """Whether a result has the element type that a node computes in."""
    return any(attribute == "T" for attribute, _ in _list_argument_types(node, "output_arg"))


def list_result_dtypes(node: NodeDef) -> list[tf.DType]:
    """Return the element types of a node's results; empty for unknown op types."""
    return [tf.as_dtype(kind) for _, kind in _list_argument_types(node, "output_arg")]


def _list_argument_types(node: NodeDef, arguments: str) -> list[tuple[str, int]]:
    """Return, per input or result, the attribute with its type, if any, and the type."""
    definition = op_def_registry.get(node.op)
    types: list[tuple[str, int]] = []
    for argument in getattr(definition, arguments) if definition is not None else ():
        if argument.type_list_attr:
            types += [("", kind) for kind in node.attr[argument.type_list_attr].list.type]
            continue
        name = argument.type_attr
        kind = node.attr[name].type if name in node.attr else argument.type
        types += [(name, kind)] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
    return types


@dataclass
class TensorGraph:
    """Nodes by name, producers first except in loops.

    Nodes are never changed in place but replaced, so that copies can share them.
    """

    nodes: dict[str, NodeDef]
    versions: VersionDef = field(default_factory=VersionDef)
    library: FunctionDefLibrary = field(default_factory=FunctionDefLibrary)

    @classmethod
    def from_graph_def(cls, graph: GraphDef) -> TensorGraph:
        """Adopt the nodes of a `GraphDef`, which must not be changed afterwards."""
        return cls({node.name: node for node in graph.node}, graph.versions, graph.library)

    def to_graph_def(self) -> GraphDef:
        """Return a `GraphDef` with copies of the nodes."""
        graph = GraphDef(versions=self.versions, library=self.library)
        graph.node.extend(self.nodes.values())
        return graph

    def copy_graph(self) -> TensorGraph:
        """Return another graph with the same nodes."""
        return TensorGraph(dict(self.nodes), self.versions, self.library)

    def __getitem__(self, tensor: str) -> NodeDef:
        return self.nodes[get_node_name(tensor)]

    def __contains__(self, tensor: str) -> bool:
        return get_node_name(tensor) in self.nodes

    def add_node(self, node: NodeDef) -> str:
        """Add a node, replacing any of the same name; return the name."""
        self.nodes[node.name] = node
        return str(node.name)

    def put_node(self, op: str, name: str, inputs: Sequence[str] = (), **attributes: object) -> str:
        """Add a new node (see `make_node`); return its name, numbered if already in use."""
        return self.add_node(make_node(op, self.unused_name(name), inputs, **attributes))

    def put_constant(self, name: str, value: object, dtype: tf.DType | None = None) -> str:
        """Add a new constant (see `make_constant`); return its name, numbered likewise."""
        return self.add_node(make_constant(self.unused_name(name), value, dtype))

    def edit_node(self, name: str) -> NodeDef:
        """Replace a node by a copy, and return the copy for editing."""
        self.nodes[name] = copy_node(self.nodes[name])
        return self.nodes[name]

    def unused_name(self, name: str) -> str:
        """Return `name`, with a number appended if already in use."""
        return unique_name(name, self.nodes)

    def is_constant(self, tensor: str) -> bool:
        """Whether a tensor is a constant, without reading its value."""
        node = self.nodes.get(get_node_name(tensor))
        return node is not None and node.op == CONSTANT

    def list_node_constants(self, node: NodeDef) -> Iterator[NodeDef]:
        """Return the constants that a node reads."""
        return (self[tensor] for tensor in list_data_inputs(node) if self.is_constant(tensor))

    def find_constant(self, tensor: str) -> Array | None:
        """Return the value of a constant; None for a computed tensor."""
        return self.constant_value(tensor) if self.is_constant(tensor) else None

    def constant_value(self, tensor: str) -> Array:
        """Return the value of a tensor that is known to be constant."""
        return np.asarray(tensor_util.MakeNdarray(self[tensor].attr["value"].tensor))

    def find_consumers(self) -> dict[str, list[tuple[str, int]]]:
        """Return node → (its reader, input position of the reader), with control edges."""
        readers: dict[str, list[tuple[str, int]]] = {name: [] for name in self.nodes}
        for node in self.nodes.values():
            for position, tensor in enumerate(node.input):
                readers[get_node_name(tensor)].append((node.name, position))
        return readers

    def redirect_readers(self, replaced: Mapping[str, str], unless: Collection[str] = ()) -> None:
        """Redirect all readers of tensors to their replacements, except some nodes."""
        for name, node in list(self.nodes.items()):
            if name not in unless and any(plain_name(tensor) in replaced for tensor in node.input):
                edited = self.edit_node(name)
                for position, tensor in enumerate(edited.input):
                    edited.input[position] = replaced.get(plain_name(tensor), tensor)

    def rename_nodes(self, names: Mapping[str, str]) -> TensorGraph:
        """Return the graph with some nodes renamed (old name → new, unused name)."""
        if not names:
            return self
        nodes: dict[str, NodeDef] = {}
        for name, node in self.nodes.items():
            sources = [(tensor, get_node_name(tensor)) for tensor in node.input]
            inputs = [t.replace(s, names[s], 1) if s in names else t for t, s in sources]
            if name in names or inputs != list(node.input):
                node = copy_node(node, names.get(name))
                node.input[:] = inputs
            nodes[node.name] = node
        return TensorGraph(nodes, self.versions, self.library)

    def prune_unused(self, outputs: Iterable[str], keep: Iterable[str] = ()) -> TensorGraph:
        """Return the graph without nodes that no output needs, producers first.

        Nodes of `keep`, e.g. inputs, stay even if unread.
        """
        roots = [get_node_name(tensor) for tensor in (*keep, *outputs)]
        order: dict[str, None] = {}
        entered: set[str] = set()
        stack = [(name, False) for name in reversed(roots)]
        leading_back: list[str] = []
        while stack or leading_back:
            name, done = stack.pop() if stack else (leading_back.pop(), False)
            if done:
                order[name] = None
            elif name not in entered:
                entered.add(name)
                stack.append((name, True))
                sources = (get_node_name(tensor) for tensor in reversed(self.nodes[name].input))
                for source in sources:
                    if self.nodes[source].op == "NextIteration":
                        leading_back.append(source)
                    elif source not in entered:
                        stack.append((source, False))
        return TensorGraph({name: self.nodes[name] for name in order}, self.versions, self.library)


def list_known_sizes(shape: tf.TensorShape) -> Shape:
    """Return a shape as a tuple, with None for unknown sizes; None if the rank is unknown."""
    return None if shape.rank is None else tuple(shape.as_list())


def read_constant_shape(node: NodeDef) -> list[int]:
    """Return the shape of a constant without reading its value."""
    return [dimension.size for dimension in node.attr["value"].tensor.tensor_shape.dim]


def read_constant_dtype(node: NodeDef) -> tf.DType:
    """Return the element type of a constant."""
    return tf.as_dtype(node.attr["value"].tensor.dtype)


def count_constant_elements(node: NodeDef) -> int:
    """Return the number of elements of a constant without reading its value."""
    return math.prod(read_constant_shape(node))


def count_constant_bytes(node: NodeDef) -> int:
    """Return the size of a constant's value in bytes; 0 for other nodes."""
    if node.op != CONSTANT:
        return 0
    return count_constant_elements(node) * int(read_constant_dtype(node).size)


def make_constant_placeholder(constant: NodeDef) -> NodeDef:
    """Return a placeholder with the type and shape of a constant."""
    node = make_node("Placeholder", constant.name, constant.input)
    node.attr["dtype"].type = constant.attr["dtype"].type
    node.attr["shape"].shape.CopyFrom(constant.attr["value"].tensor.tensor_shape)
    return node


def without_large(graph: TensorGraph | GraphDef, most: int = LARGE) -> GraphDef:
    """Return a copy of a graph with placeholders for larger constants."""
    nodes = graph.nodes.values() if isinstance(graph, TensorGraph) else graph.node
    return replace_constants(
        graph, {node.name for node in nodes if count_constant_bytes(node) > most}
    )


def replace_constants(graph: TensorGraph | GraphDef, constants: Collection[str]) -> GraphDef:
    """Return a copy of a graph with placeholders for some of its constants."""
    nodes = graph.nodes.values() if isinstance(graph, TensorGraph) else graph.node
    light = GraphDef(versions=graph.versions, library=graph.library)
    light.node.extend(
        make_constant_placeholder(node) if node.name in constants else node for node in nodes
    )
    return light


def without_places(graph: TensorGraph) -> TensorGraph:
    """Return the graph without colocation constraints on nodes that may be pruned."""
    free = graph.copy_graph()
    for name in [name for name, node in free.nodes.items() if "_class" in node.attr]:
        del free.edit_node(name).attr["_class"]
    return free
