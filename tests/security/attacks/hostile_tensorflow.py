"""Graphs of TensorFlow that do more than compute, in every file a graph comes in."""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

from attacks.hostile import Attacks, command_here

from neural_mp.api.loading import load_source
from neural_mp.api.named_models import benchmark_models

TENSORFLOW = Attacks()

SHAPE = [None, 8, 8, 1]


@functools.cache
def _net() -> Any:
    from attacks.attacked_nets import keras_net

    return keras_net()


def _frozen(function: Any) -> Any:
    """The graph of a function with the weights of the net in it."""
    import tensorflow as tf
    from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

    traced = tf.function(function, autograph=False).get_concrete_function(
        tf.TensorSpec(SHAPE, tf.float32, name="image")
    )
    return convert_variables_to_constants_v2(traced).graph.as_graph_def()


def _effect(name: str, canary: Path) -> Any:
    """A harmful op, or one of its results."""
    import tensorflow as tf

    raw, file, source = tf.raw_ops, str(canary), "/etc/hostname"
    text = {"input": [], "token": "ran", "Tout": [tf.string]}
    arguments: dict[str, dict[str, Any]] = {
        "WriteFile": {"filename": file, "contents": "ran"},
        "PrintV2": {"input": "ran", "output_stream": f"file://{file}"},
        "SaveV2": {
            "prefix": file,
            "tensor_names": ["x"],
            "shape_and_slices": [""],
            "tensors": [tf.constant(1.0)],
        },
        "DebugIdentity": {"input": tf.constant(0.0), "debug_urls": [f"file://{file}"]},
        "SummaryWriter": {},
        "Abort": {"error_msg": "ran"},
        "ReadFile": {"filename": source},
        "MatchingFiles": {"pattern": "/etc/*"},
        "ImmutableConst": {"dtype": tf.uint8, "shape": [4], "memory_region_name": source},
        "PyFuncStateless": text,
        "PyFunc": text,
        "EagerPyFunc": text,
        "RestoreV2": {
            "prefix": source,
            "tensor_names": ["x"],
            "shape_and_slices": [""],
            "dtypes": [tf.string],
        },
        "WholeFileReaderV2": {},
        "DecodeProtoV2": {
            "bytes": "",
            "message_type": "x",
            "field_names": ["y"],
            "output_types": [tf.string],
            "descriptor_source": source,
        },
        "TextLineDataset": {"filenames": source, "compression_type": "", "buffer_size": 1},
        "GenerateVocabRemapping": {
            "new_vocab_file": source,
            "old_vocab_file": source,
            "new_vocab_offset": 0,
            "num_new_vocab": 1,
        },
    }
    result = getattr(raw, name)(**arguments[name])
    return result[0] if isinstance(result, tuple | list) else result


#: Ops of every sort that files may not hold.
_OPS = (
    "WriteFile",
    "PrintV2",
    "SaveV2",
    "DebugIdentity",
    "SummaryWriter",
    "Abort",
    "ReadFile",
    "MatchingFiles",
    "ImmutableConst",
    "PyFuncStateless",
    "PyFunc",
    "EagerPyFunc",
    "RestoreV2",
    "WholeFileReaderV2",
    "DecodeProtoV2",
    "TextLineDataset",
    "GenerateVocabRemapping",
)


def _with(name: str, canary: Path) -> Any:
    net = _net()

    def run(image: Any) -> Any:
        import tensorflow as tf

        with tf.control_dependencies([_effect(name, canary)]):
            return net(image, training=False)

    return run


def _load_and_run(path: Path) -> None:
    """What `inspect` and then `benchmark` do."""
    load_source(str(path), None, None)
    benchmark_models([str(path)], 2, 0, 1)


@TENSORFLOW.here("a frozen graph with", *_OPS)
def _is_frozen(folder: Path, canary: Path, name: str) -> None:
    path = folder / "net.pb"
    path.write_bytes(_frozen(_with(name, canary)).SerializeToString())
    _load_and_run(path)


@TENSORFLOW.here("a graph as text with", "WriteFile", "ReadFile")
def _is_text(folder: Path, canary: Path, name: str) -> None:
    from google.protobuf import text_format

    path = folder / "net.pbtxt"
    path.write_text(text_format.MessageToString(_frozen(_with(name, canary))))
    _load_and_run(path)


@TENSORFLOW.here("a function in the library of a graph with", "WriteFile", "PrintV2")
def _is_in_a_function(folder: Path, canary: Path, name: str) -> None:
    import tensorflow as tf

    @tf.function
    def inner(image: Any) -> Any:
        with tf.control_dependencies([_effect(name, canary)]):
            return image * 2.0

    def run(image: Any) -> Any:
        spec = tf.TensorSpec(SHAPE, tf.float32)
        return tf.raw_ops.StatefulPartitionedCall(
            args=[image], Tout=[tf.float32], f=inner.get_concrete_function(spec)
        )[0]

    traced = tf.function(run).get_concrete_function(tf.TensorSpec(SHAPE, tf.float32))
    path = folder / "net.pb"
    path.write_bytes(traced.graph.as_graph_def().SerializeToString())
    _load_and_run(path)


@TENSORFLOW.here("a shape that is worked out of a file when the graph is taken in")
def _reads_while_imported(folder: Path, canary: Path) -> None:
    import tensorflow as tf

    def run(image: Any) -> Any:
        text = tf.raw_ops.ReadFile(filename="/etc/hostname")
        size = tf.cast(tf.raw_ops.DecodeRaw(bytes=text, out_type=tf.uint8)[:1], tf.int32)
        return tf.zeros(size) + tf.reduce_sum(_net()(image, training=False))

    path = folder / "net.pb"
    path.write_bytes(_frozen(run).SerializeToString())
    load_source(str(path), None, None)


def _saved(folder: Path, call: Any, **more: Any) -> Path:
    import tensorflow as tf

    module = tf.Module()
    module.net = _net()
    spec = tf.TensorSpec(SHAPE, tf.float32, name="image")
    module.call = tf.function(call, input_signature=[spec], autograph=False)
    for key, value in more.items():
        setattr(module, key, value)
    tf.saved_model.save(module, str(folder / "saved"), signatures=module.call)
    return folder / "saved"


@TENSORFLOW.here("a SavedModel with", "WriteFile", "PrintV2", "ReadFile", "SaveV2", "Abort")
def _is_saved(folder: Path, canary: Path, name: str) -> None:
    _load_and_run(_saved(folder, _with(name, canary)))


def _edited(path: Path, edit: Any) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((path / "saved_model.pb").read_bytes())
    edit(saved.meta_graphs[0])
    (path / "saved_model.pb").write_bytes(saved.SerializeToString())


def _tabled(folder: Path) -> Path:
    """A SavedModel with a lookup table, which is filled when it is read."""
    import tensorflow as tf

    vocabulary = folder / "words.txt"
    vocabulary.write_text("a\nb\n")
    kind = tf.lookup.TextFileIndex
    source = tf.lookup.TextFileInitializer(
        str(vocabulary), tf.string, kind.WHOLE_LINE, tf.int64, kind.LINE_NUMBER
    )
    table = tf.lookup.StaticVocabularyTable(source, 1)
    return _saved(folder, lambda image: _net()(image, training=False), table=table)


def _writes_in(meta: Any, begin: str, canary: Path) -> None:
    """Put an op that writes a file into a function that is run when the model is read."""
    (function,) = (f for f in meta.graph_def.library.function if f.signature.name.startswith(begin))
    for key, text in (("file", str(canary)), ("text", "ran")):
        node = function.node_def.add(name=key, op="Const")
        node.attr["dtype"].type = 7
        node.attr["value"].tensor.dtype = 7
        node.attr["value"].tensor.tensor_shape.SetInParent()
        node.attr["value"].tensor.string_val.append(text.encode())
    node = function.node_def.add(name="write", op="WriteFile")
    node.input.extend(["file:output:0", "text:output:0"])
    function.control_ret["write"] = "write"
    function.signature.control_output.append("write")
    function.signature.is_stateful = True


@TENSORFLOW.here("a SavedModel that writes a file when its table is", "creator", "initializer")
def _fills_a_table(folder: Path, canary: Path, when: str) -> None:
    path = _tabled(folder)
    _edited(path, lambda meta: _writes_in(meta, f"__inference__{when}", canary))
    load_source(str(path), None, None)


@TENSORFLOW.here("a SavedModel that writes a file when its variables are restored")
def _restores(folder: Path, canary: Path) -> None:
    path = _tabled(folder)
    _edited(path, lambda meta: _writes_in(meta, "__inference__traced_restore", canary))
    load_source(str(path), None, None)


@TENSORFLOW.here("a SavedModel whose asset lies at", "../../secret.txt", "/etc/hostname", "link")
def _names_an_asset(folder: Path, canary: Path, name: str) -> None:
    path = _tabled(folder)
    if name == "link":
        (path / "assets" / "link").symlink_to("/etc/hostname")
    (folder / "secret.txt").write_text("a\n")

    def edit(meta: Any) -> None:
        meta.asset_file_def[0].filename = name

    _edited(path, edit)
    load_source(str(path), None, None)


@TENSORFLOW.here("a SavedModel whose table is filled from a file of ours, by a constant")
def _fills_from_elsewhere(folder: Path, canary: Path) -> None:
    path = _tabled(folder)

    def edit(meta: Any) -> None:
        _writes_in(meta, "__inference__initializer", canary)
        (function,) = (
            f for f in meta.graph_def.library.function if "initializer" in f.signature.name
        )
        nodes = [n for n in function.node_def if n.name != "write"]
        del function.node_def[:]
        function.node_def.extend(nodes)
        del function.control_ret["write"]
        del function.signature.control_output[-1]
        (fills,) = (n for n in function.node_def if n.op.startswith("InitializeTable"))
        fills.input[1] = "file:output:0"

    _edited(path, edit)
    load_source(str(path), None, None)


@TENSORFLOW.here("a SavedModel whose signature is said to be what saves a variable")
def _says_it_saves(folder: Path, canary: Path) -> None:
    path = _saved(folder, _with("SaveV2", canary))

    def edit(meta: Any) -> None:
        objects = meta.object_graph_def
        variable = next(node for node in objects.nodes if node.HasField("variable"))
        for index, node in enumerate(objects.nodes):
            if node.HasField("bare_concrete_function"):
                variable.saveable_objects[str(index)].save_function = index
        for signature in meta.signature_def.values():
            for tensor in signature.outputs.values():
                tensor.name = signature.inputs["image"].name if signature.inputs else tensor.name

    _edited(path, edit)
    _load_and_run(path)


@TENSORFLOW.here("a SavedModel with a harmless table", refused=False)
def _has_a_table(folder: Path, canary: Path) -> None:
    load_source(str(_tabled(folder)), None, None)


@TENSORFLOW.here("a result of ours into which an op was put", "WriteFile", "ReadFile")
def _is_ours(folder: Path, canary: Path, name: str) -> None:
    from tensorflow.core.protobuf import saved_model_pb2

    from neural_mp.adaptors.tensorflow.files import graph_files

    loaded = load_source(_net(), None, None)
    graph_files.save_model(loaded.held, folder)
    saved = saved_model_pb2.SavedModel()
    saved.ParseFromString((folder / graph_files.MODEL_FILE).read_bytes())
    saved.meta_graphs[0].graph_def.CopyFrom(_frozen(_with(name, canary)))
    (folder / graph_files.MODEL_FILE).write_bytes(saved.SerializeToString())
    graph_files.restore_model(folder)


@TENSORFLOW.here("a text that is nested", 90, 5_000)
def _is_nested(folder: Path, canary: Path, depth: int) -> None:
    begin, end = 'attr { key: "f" value { list { func { ', "} } } }"
    text = "node { name: 'x' op: 'NoOp' " + begin * depth + end * depth + "}"
    (folder / "net.pbtxt").write_text(text)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # as programs set it, so that the text itself can be read
    try:
        load_source(str(folder / "net.pbtxt"), None, None)
    finally:
        sys.setrecursionlimit(limit)


@TENSORFLOW.here("the command, with a graph that writes a file")
def _is_benchmarked(folder: Path, canary: Path) -> None:
    path = folder / "net.pb"
    path.write_bytes(_frozen(_with("WriteFile", canary)).SerializeToString())
    command_here("benchmark", str(path), "--input-shape", "2,8,8,1", "--iterations", "1")
