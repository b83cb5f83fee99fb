"""SavedModels of TensorFlow 1, and those that its loader for TensorFlow 2 cannot make again."""

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.errors import ModelLoadError

v1 = tf.compat.v1
WEIGHT = np.random.default_rng(0).normal(size=(3, 3, 3, 4)).astype(np.float32)
IMAGE = np.random.default_rng(1).normal(size=(2, 8, 8, 3)).astype(np.float32)


def saved(folder, *parts, variable_input=False):
    """A SavedModel of one graph for every part: `(tags, signature keys)`."""
    builder = v1.saved_model.Builder(str(folder))
    for index, (tags, keys) in enumerate(parts):
        with tf.Graph().as_default(), v1.Session() as session:
            if variable_input:
                image = v1.get_variable(
                    "image", initializer=IMAGE, use_resource=variable_input == 2
                )
            else:
                image = v1.placeholder(tf.float32, [None, 8, 8, 3], name="image")
            weight = v1.get_variable("weight", initializer=WEIGHT * (index + 1))
            result = tf.nn.relu(tf.nn.conv2d(image, weight, 1, "SAME"), name="result")
            session.run(v1.global_variables_initializer())
            signature = v1.saved_model.predict_signature_def({"x": image}, {"y": result})
            add = builder.add_meta_graph if index else builder.add_meta_graph_and_variables
            options = {"signature_def_map": dict.fromkeys(keys, signature)}
            add(*([list(tags)] if index else [session, list(tags)]), **options)
    builder.save()
    return folder


def expected(image=IMAGE):
    return np.maximum(tf.nn.conv2d(image, WEIGHT, 1, "SAME").numpy(), 0)


@pytest.mark.parametrize("kind", [1, 2])
def test_the_value_of_a_variable_may_be_an_input(tmp_path, kind):
    """As the signature `predict` of a graph that was built around variables names it."""
    path = saved(tmp_path / "model", (("myTag",), ("predict",)), variable_input=kind)
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(path)
    (port,) = model.signature.inputs
    assert (port.name, port.dtype.name) == ("x", "float32")
    assert model.signature.keys == ("predict",)
    for image in (IMAGE, 2 * IMAGE):
        np.testing.assert_allclose(adaptor.predict(model, image), expected(image), atol=1e-5)


def test_an_input_that_no_output_needs_is_kept(tmp_path):
    builder = v1.saved_model.Builder(str(tmp_path / "model"))
    with tf.Graph().as_default(), v1.Session() as session:
        image = v1.placeholder(tf.float32, [None, 8, 8, 3], name="image")
        unused = v1.placeholder(tf.float32, [None, 2], name="unused")
        result = tf.nn.relu(
            tf.nn.conv2d(image, v1.get_variable("w", initializer=WEIGHT), 1, "SAME")
        )
        session.run(v1.global_variables_initializer())
        signature = v1.saved_model.predict_signature_def({"x": image, "z": unused}, {"y": result})
        builder.add_meta_graph_and_variables(session, ["serve"], {"serving_default": signature})
    builder.save()
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(tmp_path / "model")
    inputs = {"x": IMAGE, "z": np.zeros((2, 2), np.float32)}
    np.testing.assert_allclose(adaptor.predict(model, inputs), expected(), atol=1e-5)


def test_of_several_graphs_the_one_to_serve_is_taken(tmp_path):
    path = saved(
        tmp_path / "model", (("serve",), ("serving_default",)), (("train",), ("serving_default",))
    )
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(path)
    np.testing.assert_allclose(adaptor.predict(model, IMAGE), expected(), atol=1e-5)


def test_several_graphs_without_one_to_serve_are_named(tmp_path):
    path = saved(tmp_path / "model", (("gpu",), ("predict",)), (("train",), ("predict",)))
    with pytest.raises(ModelLoadError, match=r"2 graphs, by their tags: gpu; train"):
        TensorFlowAdaptor().load(path)


def test_a_model_whose_objects_cannot_be_made_again_is_read_as_a_graph(tmp_path):
    """As one that was saved with an optimizer that this TensorFlow no longer knows."""
    module = tf.Module()
    module.weight, module.zero = tf.Variable(WEIGHT), tf.Variable(0 * WEIGHT)

    @tf.function(input_signature=[tf.TensorSpec([None, 8, 8, 3], name="x")])
    def serve(x):
        return {"y": tf.nn.relu(tf.nn.conv2d(x, module.weight, 1, "SAME"))}

    path = tmp_path / "model"
    tf.saved_model.save(module, str(path), signatures=serve)
    message = saved_model_pb2.SavedModel()
    message.ParseFromString((path / "saved_model.pb").read_bytes())
    nodes = message.meta_graphs[0].object_graph_def.nodes
    weight, moment = (i for i, node in enumerate(nodes) if node.HasField("variable"))
    nodes[0].slot_variables.add(
        original_variable_node_id=weight, slot_variable_node_id=moment, slot_name="m"
    )
    (path / "saved_model.pb").write_bytes(message.SerializeToString())
    with pytest.raises(AttributeError, match="add_slot"):
        tf.saved_model.load(str(path))

    adaptor = TensorFlowAdaptor()
    model = adaptor.load(path)
    np.testing.assert_allclose(adaptor.predict(model, IMAGE), expected(), atol=1e-5)


def test_what_nothing_reads_is_refused_with_the_fix(tmp_path):
    path = saved(tmp_path / "model", (("serve",), ("serving_default",)))
    for file in (path / "variables").iterdir():
        file.unlink()
    with pytest.raises(ModelLoadError, match=r"cannot be read.*freeze it.*\.pb file"):
        TensorFlowAdaptor().load(path)


def with_vocabulary(folder, vocabulary=("red", "green"), buckets=0):
    """A SavedModel of TensorFlow 1 that looks words up in a text file among its assets."""
    file = folder / "words.txt"
    file.write_text("\n".join(vocabulary))
    kind = tf.lookup.TextFileIndex
    with tf.Graph().as_default(), v1.Session() as session:
        text = v1.placeholder(tf.string, [None], name="text")
        lines = tf.lookup.TextFileInitializer(
            str(file), tf.string, kind.WHOLE_LINE, tf.int64, kind.LINE_NUMBER
        )
        if buckets:
            table = v1.lookup.StaticVocabularyTable(lines, buckets)
        else:
            table = v1.lookup.StaticHashTable(lines, -1)
        weight = v1.get_variable("weight", initializer=np.arange(8, dtype="f4"))
        result = tf.gather(weight, table.lookup(text) + 1)
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        init = v1.tables_initializer()
        path = str(folder / "model")
        v1.saved_model.simple_save(
            session, path, {"text": text}, {"y": result}, legacy_init_op=init
        )
    file.unlink()  # the asset is a copy
    return folder / "model"


def edited(path, edit):
    message = saved_model_pb2.SavedModel()
    message.ParseFromString((path / "saved_model.pb").read_bytes())
    edit(message.meta_graphs[0])
    (path / "saved_model.pb").write_bytes(message.SerializeToString())
    return path


@pytest.mark.parametrize("buckets", [0, 3])
def test_a_vocabulary_among_the_assets_is_frozen(tmp_path, buckets):
    path = with_vocabulary(tmp_path, buckets=buckets)
    message = saved_model_pb2.SavedModel.FromString((path / "saved_model.pb").read_bytes())
    assert "saved_model_assets" in message.meta_graphs[0].collection_def
    texts = np.array(["green", "blue", "red", ""], object)
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(path)
    assert not any("Table" in node.op for node in model.graph.nodes.values())
    run = tf.saved_model.load(str(path)).signatures["serving_default"]
    reference = run(tf.constant(texts))["y"].numpy()
    np.testing.assert_array_equal(adaptor.predict(model, texts), reference)


@pytest.mark.parametrize("name", ["../../secret.txt", "/etc/hostname"])
def test_an_asset_of_the_collection_outside_of_the_folder_is_refused(tmp_path, name):
    def edit(meta):
        (packed,) = meta.collection_def["saved_model_assets"].any_list.value
        asset = meta_graph_pb2.AssetFileDef()
        packed.Unpack(asset)
        asset.filename = name
        packed.Pack(asset)

    (tmp_path / "secret.txt").write_text("secret")
    with pytest.raises(ModelLoadError, match="outside of the model's folder"):
        TensorFlowAdaptor().load(edited(with_vocabulary(tmp_path), edit))


def test_an_entry_of_the_collection_that_is_no_asset_is_refused(tmp_path):
    def edit(meta):
        (packed,) = meta.collection_def["saved_model_assets"].any_list.value
        packed.type_url = "type.googleapis.com/tensorflow.GraphDef"

    with pytest.raises(ModelLoadError, match="entries of its collection 'saved_model_assets' must"):
        TensorFlowAdaptor().load(edited(with_vocabulary(tmp_path), edit))


@pytest.mark.parametrize("where", ["another constant", "a result"])
def test_a_table_is_filled_from_an_asset_and_only_on_initialization(tmp_path, where):
    def edit(meta):
        nodes = {node.name: node for node in meta.graph_def.node}
        fills = next(n for n in nodes.values() if n.op.startswith("InitializeTableFromTextFile"))
        path = nodes[fills.input[1]]
        if where == "a result":
            path.attr["value"].tensor.string_val[:] = [b"/etc/hostname"]
            find = next(n for n in nodes.values() if n.op.startswith("LookupTableFind"))
            find.input.append(f"^{fills.name}")
            return
        duplicate = meta.graph_def.node.add()
        duplicate.CopyFrom(path)
        duplicate.name = fills.input[1] = "other"
        duplicate.attr["value"].tensor.string_val[:] = [b"/etc/hostname"]

    with pytest.raises(ModelLoadError, match="InitializeTableFromTextFile"):
        TensorFlowAdaptor().load(edited(with_vocabulary(tmp_path), edit))
