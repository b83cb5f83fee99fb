"""Rule set `stock` against the pass inside the installed TensorFlow, node by node."""

import keras
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from keras import layers
from keras_nets import small_net
from machine import has_rewrite_pass
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp.adaptors.tensorflow.amp_pass import read_runtime_lists, run_pass
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    GraphDef,
    get_dtype_attribute,
    get_node_name,
    make_node,
)
from neural_mp.amp import graph_of, paint
from neural_mp.core.precision import Precision

pytestmark = pytest.mark.slow

SIXTEEN = {Precision.BF16: tf.bfloat16, Precision.FP16: tf.half}
WITH_A_PASS = [p for p in SIXTEEN if p is Precision.FP16 or has_rewrite_pass()]
#: Ops of one and of two inputs that keep the shape, from all four lists and from none.
UNARY = (
    "Tanh",
    "Sigmoid",
    "Softmax",
    "LogSoftmax",
    "Softplus",
    "Elu",
    "Selu",
    "Sqrt",
    "Log",
    "Softsign",
    "Erf",
    "LeakyRelu",
    "Relu",
    "Relu6",
    "Abs",
    "Neg",
    "Identity",
    "Floor",
    "Ceil",
    "Sign",
    "Round",
    "ZerosLike",
    "OnesLike",
    "StopGradient",
    "Exp",
    "Expm1",
    "Sin",
    "Atan",
)
BINARY = (
    "MatMul",
    "MatMul",
    "MatMul",
    "Add",
    "AddV2",
    "Mul",
    "Sub",
    "RealDiv",
    "FloorDiv",
    "Maximum",
    "Minimum",
    "Pow",
    "Atan2",
)


@st.composite
def triples(draw):
    """Name, op and inputs of up to 25 ops that compute [4, 4] from `x`, in order."""
    names, ops = ["x"], []
    for index in range(draw(st.integers(3, 25))):
        kind = draw(st.sampled_from((*UNARY, *BINARY)))
        recent = st.sampled_from(names[-6:])
        inputs = [draw(recent)] + ([draw(recent)] if kind in BINARY else [])
        ops.append((f"n{index}", kind, inputs))
        names.append(f"n{index}")
    consumed = {source for _, _, inputs in ops for source in inputs}
    ends = [(f"{name}_out", "Identity", [name]) for name, _, _ in ops if name not in consumed]
    return ops + ends, [name for name, _, _ in ends]


def graph_def(ops) -> GraphDef:
    graph = GraphDef(versions=tf.Graph().as_graph_def().versions)
    graph.node.append(make_node("Placeholder", "x", dtype=tf.float32))
    graph.node[0].attr["shape"].shape.CopyFrom(tf.TensorShape([4, 4]).as_proto())
    extra = {
        "MatMul": {"transpose_a": False, "transpose_b": False},
        "LeakyRelu": {"alpha": 0.2},
    }
    for name, kind, inputs in ops:
        graph.node.append(make_node(kind, name, inputs, T=tf.float32, **extra.get(kind, {})))
    return graph


def in_16_bits(graph: GraphDef, outputs, precision) -> dict[str, bool]:
    """What TensorFlow's pass makes of every node."""
    dtype = SIXTEEN[precision].as_datatype_enum
    result = run_pass(graph, precision, ["x"], outputs)
    return {node.name: node.attr["T"].type == dtype for node in result.node}


@pytest.mark.skipif(not has_rewrite_pass(), reason="its pass for BF16 does nothing here")
@settings(max_examples=80)
@given(triples())
def test_random_graphs_in_bf16(drawn):
    agree(drawn, Precision.BF16)


@settings(max_examples=80)
@given(triples())
def test_random_graphs_in_fp16(drawn):
    agree(drawn, Precision.FP16)


def agree(drawn, precision) -> None:
    ops, outputs = drawn
    lowered = in_16_bits(graph_def(ops), outputs, precision)
    boundaries = dict.fromkeys(outputs, "it is fetched, so the pass leaves it alone")
    painting = paint(graph_of(ops), read_runtime_lists(precision), "stock", boundaries=boundaries)
    for name, kind, _ in ops:
        assert lowered[name] == (name in painting.allowed), (
            name,
            kind,
            painting.paints[name].reason,
        )


def encoder(width: int = 32, heads: int = 4, length: int = 16) -> keras.Model:
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    x = layers.Embedding(512, width)(tokens)
    x = layers.LayerNormalization()(x + layers.Embedding(512, width)(keras.ops.arange(length)))
    for _ in range(2):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(heads, width // heads)(x, x))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization()(x + layers.Dense(width)(hidden))
    return keras.Model(tokens, layers.Dense(2)(layers.Dense(width, activation="tanh")(x[:, 0])))


NETS = {
    "residual net": small_net,
    "MobileNetV2": lambda: keras.applications.MobileNetV2(weights=None, input_shape=(32, 32, 3)),
    "transformer encoder": encoder,
}


@pytest.mark.parametrize("name", NETS)
def test_whole_nets(name):
    net = NETS[name]()
    (tensor,) = net.inputs
    function = tf.function(lambda x: net(x, training=False)).get_concrete_function(
        tf.TensorSpec(tensor.shape, tensor.dtype, name="x")
    )
    graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
    for node in graph.node:
        node.device = ""  # for FP16, TensorFlow looks at what lies on a GPU, or nowhere
    outputs = [node.name for node in graph.node if node.name == "Identity"]
    ops = [
        (node.name, node.op, [get_node_name(t) for t in node.input if not t.startswith("^")])
        for node in graph.node
    ]
    boundaries = {
        node.name: "it computes no float32"
        for node in graph.node
        if get_dtype_attribute(node) is not tf.float32
    }
    boundaries |= dict.fromkeys(["x", *outputs], "it is fed or fetched")
    for precision in WITH_A_PASS:
        lowered = in_16_bits(graph, outputs, precision)
        painting = paint(
            graph_of(ops), read_runtime_lists(precision), "stock", boundaries=boundaries
        )
        differ = [
            (op, kind, painting.paints[op].reason)
            for op, kind, _ in ops
            if op in lowered and lowered[op] != (op in painting.allowed)
        ]
        assert not differ
        assert len(painting.allowed) > 20


def test_the_lists_hold_what_the_graphs_are_made_of():
    """So that all four lists, and no list, occur in the graphs above."""
    for precision in WITH_A_PASS:
        lists = read_runtime_lists(precision)
        assert {lists.of(kind) for kind in (*UNARY, *BINARY)} == {
            None,
            *(name for name in type(lists.of("MatMul"))),
        }
