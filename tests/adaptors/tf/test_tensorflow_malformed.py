"""Malformed nodes and objects, which TensorFlow itself does not report: one error each."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import saved_model_pb2

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.files.graph_checks import (
    check_graph,
    check_nodes,
    check_saved_model,
)
from neural_mp.adaptors.tensorflow.graph.tensor_graph import GraphDef, NodeDef
from neural_mp.errors import DataError, ModelLoadError

F32, U8, S8 = types_pb2.DT_FLOAT, types_pb2.DT_QUINT8, types_pb2.DT_QINT8
KERNELS = ("_FusedQuantizedConv2D", "_FusedQuantizedDepthwiseConv2D", "_QuantizedMatMul")
LISTS = ("Tdevice_inputs", "Thost_inputs", "Tdevice_outputs", "Thost_outputs")
#: Ops fused into a kernel → numbers of types in `LISTS`.
FUSED = {
    ("BiasAdd", "Requantize"): (3, 6, 1, 2),
    ("BiasAdd", "Relu", "Dequantize"): (3, 4, 1, 0),
}


def _product() -> GraphDef:
    run = tf.function(lambda x: tf.nn.relu(x @ tf.ones((4, 2))) @ tf.ones((2, 3)))
    return run.get_concrete_function(tf.TensorSpec([None, 4], name="x")).graph.as_graph_def()


def _kernel(op: str, steps: tuple[str, ...]) -> GraphDef:
    graph, counts = GraphDef(), FUSED[steps]
    names = [f"x{index}" for index in range(counts[0] + counts[1])]
    for index, name in enumerate(names):
        node = graph.node.add(name=name, op="Placeholder")
        node.attr["dtype"].type = (U8, S8)[index] if index < 2 else F32
    node = graph.node.add(name="kernel", op=op, input=names)
    node.attr["fused_ops"].list.s.extend(step.encode() for step in steps)
    for key, count in zip(LISTS, counts, strict=True):
        types = [U8, S8, F32][:count] if key == "Tdevice_inputs" else [F32] * count
        node.attr[key].list.type.extend(types)
    if op == "_QuantizedMatMul":
        node.attr["T1"].type, node.attr["T2"].type = U8, S8
    else:
        node.attr["Tsummand"].type = U8
        node.attr["padding"].s = b"VALID"
        node.attr["strides"].list.i.extend([1, 1, 1, 1])
    return graph


@pytest.mark.parametrize("steps", FUSED, ids="+".join)
@pytest.mark.parametrize("op", KERNELS)
def test_an_integer_kernel_must_have_the_tensors_of_its_fused_ops(op, steps):
    graph = _kernel(op, steps)
    check_graph(graph, "the graph")
    for key, count in zip(LISTS, FUSED[steps], strict=True):
        for length in range(count):
            faulty = _kernel(op, steps)
            del faulty.node[-1].attr[key].list.type[length:]
            with pytest.raises(ModelLoadError, match=rf"'kernel'.*{op}.*must list {count} types"):
                check_graph(faulty, "the graph")
    del graph.node[-1].input[-1]
    with pytest.raises(ModelLoadError, match="must have"):
        check_graph(graph, "the graph")


def test_a_malformed_node_of_a_function_is_found():
    graph, kernel = _product(), _kernel(KERNELS[0], ("BiasAdd", "Requantize"))
    function = graph.library.function.add()
    function.signature.name = "inner"
    function.node_def.extend(kernel.node)
    check_graph(graph, "the graph")
    function.node_def[-1].attr["Thost_outputs"].ClearField("list")
    with pytest.raises(ModelLoadError, match="of function 'inner'"):
        check_graph(graph, "the graph")


@pytest.mark.parametrize("number", [0, 98, 99, 100, 199, 2**31 - 1, -1])
def test_types_that_do_not_exist(number):
    def of_node(node: NodeDef) -> None:
        node.attr["dtype"].type = number

    def of_value(node: NodeDef) -> None:
        node.attr["value"].tensor.dtype = number

    def of_both(node: NodeDef) -> None:
        node.attr["dtype"].type = node.attr["value"].tensor.dtype = number

    for edit in (of_node, of_value, of_both):
        graph = _product()
        edit(next(node for node in graph.node if node.op == "Const"))
        with pytest.raises(
            ModelLoadError, match=f"must be a type of TensorFlow, got number {number}"
        ):
            check_graph(graph, "the graph")


def _without(key: str) -> Callable[[NodeDef], None]:
    return lambda node: node.attr.pop(key)


def _empty(key: str) -> Callable[[NodeDef], None]:
    return lambda node: node.attr[key].Clear()


@pytest.mark.parametrize("edit", [_without, _empty], ids=["missing", "empty"])
@pytest.mark.parametrize(("op", "key"), [("Const", "value"), ("Const", "dtype"), ("MatMul", "T")])
def test_attributes_without_a_value(op, key, edit):
    graph = _product()
    edit(key)(next(node for node in graph.node if node.op == op))
    with pytest.raises(ModelLoadError, match=f"its attribute '{key}' (is missing|must be)"):
        check_graph(graph, "the graph")


def _of_long_node() -> GraphDef:
    return GraphDef(node=[NodeDef(name="x" * 20_000, op="NoOp")])


def _of_long_variable() -> GraphDef:
    """A graph that restores a variable, whose name would be part of an error."""
    with tf.Graph().as_default() as graph:
        tf.raw_ops.RestoreV2(
            prefix="p", tensor_names=["x" * 20_000], shape_and_slices=[""], dtypes=[tf.float32]
        )
    return graph.as_graph_def()


@pytest.mark.parametrize("make", [_of_long_node, _of_long_variable])
def test_names_without_end_are_refused(make):
    """TensorFlow searches the messages of its errors for names, for minutes in long ones."""
    with pytest.raises(ModelLoadError, match="must have at most 10000 characters, got 20000") as e:
        check_nodes(make(), "the graph")
    assert len(str(e.value)) < 500


@pytest.mark.parametrize("sizes", [[4, 3], [4, -2], [1] * 255, [2**40, 2**40]])
def test_values_that_do_not_fit_their_shape(sizes):
    graph = _product()
    value = next(n for n in graph.node if n.op == "Const").attr["value"].tensor
    value.tensor_content = b"\0" * 32
    value.tensor_shape.Clear()
    for size in sizes:
        value.tensor_shape.dim.add().size = size
    with pytest.raises(ModelLoadError, match="its attribute 'value' must have"):
        check_graph(graph, "the graph")


def test_sizes_that_end_the_process():
    split = GraphDef()
    for name, value in (("x", [[1.0, 2.0]]), ("sizes", [[1, 1]]), ("axis", 1)):
        node = split.node.add(name=name, op="Const")
        node.attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value))
        node.attr["dtype"].type = node.attr["value"].tensor.dtype
    node = split.node.add(name="split", op="SplitV", input=["x", "sizes", "axis"])
    node.attr["num_split"].i = 2
    node.attr["T"].type, node.attr["Tlen"].type = F32, types_pb2.DT_INT32
    with pytest.raises(ModelLoadError, match="'split'.*sizes must be a vector"):
        check_graph(split, "the graph")
    node.attr["num_split"].i = 2**40
    with pytest.raises(ModelLoadError, match="'num_split' must be from 0 to 65536"):
        check_graph(split, "the graph")


@pytest.mark.parametrize("axes", [2, 3, 2**40])
def test_batch_axes_that_an_input_does_not_have(axes):
    spec = tf.TensorSpec([None, 4], name="x")
    run = tf.function(lambda x: tf.gather(x, [[0], [1]], axis=1, batch_dims=1))
    graph = run.get_concrete_function(spec).graph.as_graph_def()
    check_graph(graph, "the graph")
    next(node for node in graph.node if node.op == "GatherV2").attr["batch_dims"].i = axes
    with pytest.raises(ModelLoadError, match=r"GatherV2.*must have at least"):
        check_graph(graph, "the graph")


def test_an_input_of_terabytes_is_not_generated(tmp_path):
    graph = _product()
    placeholder = next(node for node in graph.node if node.op == "Placeholder")
    placeholder.attr["shape"].shape.dim[0].size = 2**40
    (tmp_path / "net.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(DataError, match="must have at most 268435456 elements.*pass data"):
        TensorFlowAdaptor().load(tmp_path / "net.pb")


def test_nodes_of_a_function_that_do_not_fit_each_other(tmp_path):
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.tanh(x) * 2.0
        return x

    run = tf.function(loop).get_concrete_function(tf.TensorSpec([None, 4], name="x"))
    graph = run.graph.as_graph_def()
    (tanh,) = (n for f in graph.library.function for n in f.node_def if n.op == "Tanh")
    tanh.attr["T"].type = types_pb2.DT_DOUBLE
    (tmp_path / "net.pb").write_bytes(graph.SerializeToString())
    with pytest.raises(ModelLoadError, match=r"cannot run.*Tanh"):
        TensorFlowAdaptor().load(tmp_path / "net.pb")


def _saved(folder: Path) -> saved_model_pb2.SavedModel:
    module = tf.Module()
    module.weight = tf.Variable(tf.ones((4, 2)))
    spec = tf.TensorSpec([None, 4], name="x")
    module.call = tf.function(lambda x: {"y": x @ module.weight}, input_signature=[spec])
    tf.saved_model.save(module, str(folder), signatures=module.call)
    return saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())


@pytest.mark.parametrize("identifier", ["_generic_user_object", "signature_map", "unknown"])
def test_objects_of_another_version_do_not_hide_the_signatures(tmp_path, identifier):
    """TensorFlow's loader then makes a `_UserObject`, without the functions of the object."""
    saved = _saved(tmp_path)
    nodes = saved.meta_graphs[0].object_graph_def.nodes
    node = next(n for n in nodes if n.user_object.identifier == "signature_map")
    node.user_object.identifier = identifier
    node.user_object.version.Clear()
    node.user_object.version.min_consumer = 99
    (tmp_path / "saved_model.pb").write_bytes(saved.SerializeToString())
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(tmp_path)
    assert adaptor.predict(model, tf.ones((1, 4)).numpy()).tolist() == [[4.0, 4.0]]


def test_a_missing_function_is_named(tmp_path):
    """A session would put the text of all other functions into its error, and search it."""
    saved = _saved(tmp_path)
    graph = saved.meta_graphs[0].graph_def
    missing = next(node.attr["f"].func.name for node in graph.node if "f" in node.attr)
    remaining = [
        function for function in graph.library.function if function.signature.name != missing
    ]
    del graph.library.function[:]
    graph.library.function.extend(remaining)
    with pytest.raises(
        ModelLoadError, match=f"calls the function '{missing}', which the file does"
    ):
        check_saved_model(saved, tmp_path / "saved_model.pb", session=True)


def test_signatures_that_are_no_functions_are_named():
    module = tf.Module()
    module.signatures = tf.Module()
    with pytest.raises(ModelLoadError, match="signatures of the model must be functions by name"):
        TensorFlowAdaptor().load(module)


def _convolution() -> GraphDef:
    def run(image: tf.Tensor) -> tf.Tensor:
        biased = tf.nn.bias_add(tf.nn.conv2d(image, tf.ones((3, 3, 1, 2)), 1, "SAME"), [1.0, 2.0])
        half, _ = tf.split(tf.nn.max_pool2d(tf.nn.relu(biased), 2, 2, "VALID"), [1, 1], axis=3)
        padded = tf.pad(half, [[0, 0], [1, 1], [1, 1], [0, 0]])
        return tf.reshape(padded, [-1, 36]) @ tf.ones((36, 2))

    spec = tf.TensorSpec([None, 8, 8, 1], name="image")
    return tf.function(run).get_concrete_function(spec).graph.as_graph_def()


def _change(graph: GraphDef, draw: random.Random) -> None:
    """Change one type, size or kind of attribute."""
    node = draw.choice([node for node in graph.node if node.attr])
    attribute = node.attr[draw.choice(sorted(node.attr))]
    kind, sizes = attribute.WhichOneof("value"), [-7, 0, 1, 99, 2**31 - 1, 2**40]
    if kind == "type":
        attribute.type = draw.choice([0, 7, 20, 99, 101, 2**31 - 1])
    elif kind == "tensor" and draw.random() < 0.5:
        attribute.tensor.dtype = draw.choice([0, 1, 3, 7, 20, 99])
    elif kind == "tensor":
        attribute.tensor.tensor_shape.dim.add().size = draw.choice(sizes)
    elif kind == "shape":
        attribute.shape.dim.add().size = draw.choice(sizes)
    elif kind == "list" and attribute.list.i:
        attribute.list.i[0] = draw.choice(sizes)
    else:
        attribute.Clear()


_LOAD_ALL = """
import sys
from pathlib import Path
from neural_mp.api.loading import load_source
from neural_mp.errors import NeuralMPError
refused = 0
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        load_source(str(path), None, None)
    except NeuralMPError:
        refused += 1
print(refused)
"""


_HUGE = """
from neural_mp.adaptors.tensorflow.graph.runtime import import_graph
from neural_mp.adaptors.tensorflow.graph.tensor_graph import GraphDef
from neural_mp.errors import ModelLoadError
graph = GraphDef()
for name, dtype in (("x", 1), ("axes", 3)):
    node = graph.node.add(name=name, op="Placeholder")
    node.attr["dtype"].type = dtype
graph.node[1].attr["shape"].shape.dim.add().size = 2**40
node = graph.node.add(name="turned", op="Transpose", input=["x", "axes"])
node.attr["T"].type, node.attr["Tperm"].type = 1, 3
try:
    import_graph(graph)
except ModelLoadError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> subprocess.CompletedProcess[str]:
    """A process that loads changed graphs, and at last one that native code refuses."""
    folder, draw = tmp_path_factory.mktemp("changed"), random.Random(0)
    for index in range(200):
        graph = (_product, _convolution)[index % 2]()
        _change(graph, draw)
        (folder / f"{index:03}.pb").write_bytes(graph.SerializeToString())
    command = [sys.executable, "-c", _LOAD_ALL + _HUGE, str(folder)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_changed_types_and_sizes_end_in_a_model_or_one_error(done):
    assert int(done.stdout.splitlines()[0]) > 100, done.stderr[-3000:]


@pytest.mark.slow
def test_an_error_from_native_code_does_not_keep_the_process_from_ending(done):
    refused = done.stdout.splitlines()[1]
    assert refused.startswith("refused: TensorFlow cannot read the graph"), done.stderr[-2000:]
    assert done.returncode == 0
