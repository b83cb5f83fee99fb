"""What a graph of a file may hold, and what it may where the user trusts it."""

import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.framework import op_def_registry

import neural_mp
from neural_mp.adaptors.tensorflow.files.graph_checks import (
    check_graph,
    is_harmless,
    iterate_unsafe_ops,
)
from neural_mp.adaptors.tensorflow.graph.tensor_graph import GraphDef, NodeDef
from neural_mp.api.loading import load_source
from neural_mp.errors import ModelLoadError


@pytest.fixture
def reading(tmp_path):
    """A graph that adds the length of a file to its input."""

    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def run(x):
        length = tf.strings.length(tf.io.read_file(str(tmp_path / "words.txt")))
        return x + tf.cast(length, tf.float32)

    (tmp_path / "words.txt").write_text("abc")
    path = tmp_path / "net.pb"
    path.write_bytes(run.get_concrete_function().graph.as_graph_def().SerializeToString())
    return str(path)


def test_an_op_that_reads_a_file_is_refused_unless_it_is_trusted(reading):
    with pytest.raises(ModelLoadError, match=r"ReadFile.*--trust ReadFile"):
        load_source(reading, None, None)
    with pytest.raises(ModelLoadError, match="ReadFile"):
        load_source(reading, None, None, trust=("WriteFile",))
    assert load_source(reading, None, None, trust=("ReadFile",)) is not None
    converter = neural_mp.MixedPrecision(model=reading, precisions="fp32", trust=("ReadFile",))
    assert converter.sensitivity(0) is not None
    with neural_mp.trusting(["ReadFile"]):
        assert load_source(reading, None, None) is not None


@pytest.mark.parametrize(
    "op",
    [
        "Conv2D",
        "VarHandleOp",
        "ReadVariableOp",
        "RandomUniform",
        "TensorArrayV3",
        "While",
        "StatefulPartitionedCall",
        "HashTableV2",
        "LookupTableFindV2",
        "Assert",
        "Print",
        "FIFOQueueV2",
        "QueueDequeueV2",
        "IteratorGetNext",
        "_FusedConv2D",
        "CudnnRNNV3",
        "XlaDotV2",
        "XlaSort",
        "XlaSharding",
        "_MklLayerNorm",
        "_FusedQuantizedConv2D",
        "RngReadAndSkip",
        "NonDeterministicInts",
        "QuantizedConv2DWithBiasAndRequantize",
    ],
)
def test_ops_that_compute_and_keep_values_are_taken(op):
    assert op_def_registry.get(op) is not None
    assert is_harmless(NodeDef(op=op))


@pytest.mark.parametrize(
    "op",
    [
        "ReadFile",
        "WriteFile",
        "MatchingFiles",
        "PyFunc",
        "PyFuncStateless",
        "EagerPyFunc",
        "RestoreV2",
        "SaveV2",
        "WholeFileReaderV2",
        "TFRecordDatasetV2",
        "SqlDataset",
        "LMDBReader",
        "CacheDatasetV2",
        "SnapshotDatasetV2",
        "SaveDatasetV2",
        "LoadDataset",
        "DataServiceDatasetV4",
        "RegisterDatasetV2",
        "RpcClient",
        "RpcServer",
        "RpcCall",
        "RemoteCall",
        "_Send",
        "_Recv",
        "CreateSummaryFileWriter",
        "WriteSummary",
        "DebugIdentityV2",
        "DebugIdentity",
        "FileSystemSetConfiguration",
        "DecodeProtoV2",
        "EncodeProto",
        "ImmutableConst",
        "InitializeTableFromTextFileV2",
        "DatasetFromGraph",
        "FixedUnigramCandidateSampler",
        "LoadAndRemapMatrix",
        "GenerateVocabRemapping",
        "Abort",
        "ShutdownDistributedTPU",
        "RecordInput",
        "ImportEvent",
        "MergeV2Checkpoints",
    ],
)
def test_ops_that_do_more_are_not(op):
    assert op_def_registry.get(op) is not None
    assert not is_harmless(NodeDef(op=op))


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        *((op, "calls native functions by name") for op in ("XlaCustomCall", "XlaCustomCallV2")),
        *((op, "calls native functions by name") for op in ("XlaLaunch", "XlaLaunchV2")),
        *((op, "calls native functions by name") for op in ("XlaCallModule", "MlirPassthroughOp")),
        ("BoostedTreesPredict", "does not check its inputs"),
        ("QueueDequeueManyV2", "does not check its inputs"),
        ("_MklConv2D", "does not check its inputs"),
        ("ReadFile", "may access files"),
    ],
)
@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_refusal_says_what_the_op_does_at_any_depth(op, reason, depth):
    """Directly in the graph, in a compiled function, and in a function that this one calls."""
    graph = GraphDef()
    nodes = graph.node
    for level in range(depth):
        name = f"function_{level}"
        call = nodes.add(name="call", op="PartitionedCall")
        for key in ("Tin", "Tout"):
            call.attr[key].list.SetInParent()
        call.attr["f"].func.name = name
        function = graph.library.function.add()
        function.signature.name = name
        function.attr["_XlaMustCompile"].b = True
        nodes = function.node_def
    node = nodes.add(name="harmful", op=op)
    for attribute in op_def_registry.get(op).attr if op_def_registry.get(op) else ():
        if not attribute.HasField("default_value") and attribute.type == "type":
            node.attr[attribute.name].type = tf.float32.as_datatype_enum
    harm = [suspect for suspect in iterate_unsafe_ops(graph) if suspect.node.name == "harmful"]
    assert len(harm) == 1
    assert reason in str(harm[0].refusal_error("the graph"))


def _calling_a_native_function(folder):
    """A SavedModel and a graph with a custom call of XLA in a compiled function."""

    @tf.function(jit_compile=True)
    def inner(x):
        return gen_xla_ops.xla_custom_call_v2(
            operands=[x],
            call_target_name="TopK",
            backend_config=b"",
            has_side_effect=True,
            result_dtypes=[tf.float32],
            result_shapes=[[4, 4]],
        )[0]

    module = tf.Module()
    module.run = tf.function(
        lambda x: {"y": inner(x) + 1.0}, input_signature=[tf.TensorSpec([4, 4], name="x")]
    )
    tf.saved_model.save(module, str(folder / "saved"), signatures=module.run)
    graph = module.run.get_concrete_function().graph.as_graph_def()
    (folder / "net.pb").write_bytes(graph.SerializeToString())
    return folder / "saved", folder / "net.pb"


def test_a_custom_call_in_a_compiled_function_is_refused_before_it_is_loaded(tmp_path):
    for path in _calling_a_native_function(tmp_path):
        with pytest.raises(ModelLoadError, match="XlaCustomCallV2.*calls native functions by name"):
            load_source(str(path), None, None)


def test_ops_print_to_streams_only():
    for stream, fine in (("stderr", True), ("log(info)", True), ("file:///tmp/x", False)):
        node = NodeDef(op="PrintV2")
        node.attr["output_stream"].s = stream.encode()
        assert is_harmless(node) is fine


@pytest.mark.parametrize("op", ["WriteFile", "PyFunc"])
def test_an_op_that_is_handed_on_from_function_to_function_is_found(op):
    graph = GraphDef()
    call = graph.node.add(name="call", op="PartitionedCall")
    for key in ("Tin", "Tout"):
        call.attr[key].list.SetInParent()
    outer = call.attr["f"].func
    outer.name = "outer"
    outer.attr["inner"].list.func.add(name="middle").attr["f"].func.name = op
    with pytest.raises(ModelLoadError, match=op):
        check_graph(graph, "the graph")


def test_a_function_that_fills_a_table_is_not_handed_a_file_by_another(tmp_path):
    vocabulary = tmp_path / "words.txt"
    vocabulary.write_text("a\nb\n")

    class Tables(tf.Module):
        """A model with two tables, each of a file."""

        def __init__(self):
            super().__init__()
            self.tables = [
                tf.lookup.StaticHashTable(
                    tf.lookup.TextFileInitializer(str(vocabulary), *_LINES), default_value=-1
                )
                for _ in range(2)
            ]

        @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
        def run(self, x):
            return x + 1.0

    model, folder = Tables(), tmp_path / "saved"
    tf.saved_model.save(model, folder, signatures=model.run)
    assert load_source(str(folder), None, None) is not None
    saved = saved_model_pb2.SavedModel.FromString((folder / "saved_model.pb").read_bytes())
    library = saved.meta_graphs[0].graph_def.library
    filling, second = (f for f in library.function if any(map(_fills, f.node_def)))
    (node,) = filter(_fills, second.node_def)
    table, name = node.input[0], node.name
    node.Clear()
    node.name, node.op = name, "StatefulPartitionedCall"
    node.attr["f"].func.name = filling.signature.name
    for argument in filling.signature.input_arg:
        is_path = argument.type == tf.string.as_datatype_enum
        node.input.append("path:output:0" if is_path else table)
        node.attr["Tin"].list.type.append(argument.type)
    node.attr["Tout"].list.type.extend(a.type for a in filling.signature.output_arg)
    path = second.node_def.add(name="path", op="Const")
    path.attr["dtype"].type = tf.string.as_datatype_enum
    path.attr["value"].tensor.CopyFrom(tf.make_tensor_proto("/etc/hostname"))
    (folder / "saved_model.pb").write_bytes(saved.SerializeToString())
    with pytest.raises(ModelLoadError, match="InitializeTableFromTextFile"):
        load_source(str(folder), None, None)


#: A text file as a table: its lines, and their numbers.
_LINES = (
    tf.string,
    tf.lookup.TextFileIndex.WHOLE_LINE,
    tf.int64,
    tf.lookup.TextFileIndex.LINE_NUMBER,
)


def _fills(node):
    return node.op.startswith("InitializeTableFromTextFile")


def _unused_save(graph: GraphDef) -> GraphDef:
    """A graph with a function that writes a checkpoint."""
    function = graph.library.function.add()
    function.signature.name = "traced_save"
    function.node_def.add(name="save", op="SaveV2")
    return graph


def _product() -> GraphDef:
    @tf.function(input_signature=[tf.TensorSpec([None, 4], name="x")])
    def run(x):
        return tf.nn.relu(x) @ tf.ones((4, 2))

    return run.get_concrete_function().graph.as_graph_def()


def test_a_function_that_nothing_calls_is_dropped(tmp_path):
    path = tmp_path / "net.pb"
    path.write_bytes(_unused_save(_product()).SerializeToString())
    model = load_source(str(path), None, None)
    assert not model.held.graph.library.function


@pytest.mark.parametrize("attribute", ["f", "body", "_anything"])
def test_a_function_that_an_attribute_of_a_node_names_is_judged(tmp_path, attribute):
    graph = _unused_save(_product())
    outer = graph.library.function.add()
    outer.signature.name = "outer"
    outer.node_def.add(name="inner", op="StatefulPartitionedCall").attr[
        attribute
    ].func.name = "traced_save"
    node = graph.node[-1]
    node.attr["_body"].func.name = "outer"
    path = tmp_path / "net.pb"
    path.write_bytes(graph.SerializeToString())
    with pytest.raises(ModelLoadError, match=r"function 'traced_save'.*SaveV2"):
        load_source(str(path), None, None)


def test_the_gradient_of_a_function_that_is_called_is_judged(tmp_path):
    graph = _unused_save(_product())
    graph.library.function.add().signature.name = "layer"
    graph.library.gradient.add(function_name="layer", gradient_func="traced_save")
    graph.node[-1].attr["_body"].func.name = "layer"
    path = tmp_path / "net.pb"
    path.write_bytes(graph.SerializeToString())
    with pytest.raises(ModelLoadError, match="SaveV2"):
        load_source(str(path), None, None)


def test_nodes_that_no_output_needs_are_dropped(tmp_path):
    graph = _product()
    weight = next(node.name for node in graph.node if node.op == "Const")
    graph.node.add(name="save", op="SaveV2", input=[weight])
    output = graph.node[-2].name
    path = tmp_path / "net.pb"
    path.write_bytes(graph.SerializeToString())
    for outputs in (None, output):
        model = load_source(str(path), None, outputs)
        assert "save" not in model.held.graph.nodes
    graph.node[-2].input.append("^save")
    del graph.node[-1].input[:]
    path.write_bytes(graph.SerializeToString())
    with pytest.raises(ModelLoadError, match="SaveV2"):
        load_source(str(path), None, output)
