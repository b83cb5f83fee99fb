"""Graphs that the adaptor imports and rewrites equal those of TensorFlow's own functions."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2
from tensorflow.python.grappler import tf_optimizer

from neural_mp.adaptors.tensorflow.graph.runtime import (
    Runner,
    import_graph,
    import_runnable,
    run_offline_passes,
)

DATA = np.random.default_rng(0).normal(size=(2, 4, 3)).astype("f4")


@pytest.fixture(scope="module", params=[True, False], ids=["lowered loop", "loop in functions"])
def recurrent(request):
    """A frozen LSTM on two devices, with its input and output."""
    net = keras.Sequential([keras.Input((4, 3)), keras.layers.LSTM(2), keras.layers.Dense(2)])
    concrete = tf.function(net).get_concrete_function(tf.TensorSpec((None, 4, 3)))
    frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=request.param)
    graph = frozen.graph.as_graph_def()
    graph.node[-1].device = "/device:CPU:0"
    return graph, frozen.inputs[0].name, frozen.outputs[0].name


def plainly_imported(graph):
    """Return the graph as TensorFlow itself imports it."""
    plain = tf.Graph()
    with plain.as_default():
        tf.graph_util.import_graph_def(graph, name="")
    return plain


def test_an_imported_graph_equals_the_one_that_tensorflow_imports(recurrent):
    graph = recurrent[0]
    ours, plain = import_graph(graph), plainly_imported(graph)
    assert ours.as_graph_def(add_shapes=True) == plain.as_graph_def(add_shapes=True)
    assert [op.name for op in ours.get_operations()] == [op.name for op in plain.get_operations()]


def test_an_imported_graph_can_be_extended_and_names_stay_unique(recurrent):
    graph, input_name, output_name = recurrent
    ours = import_graph(graph)
    with ours.as_default():
        tensor = ours.get_tensor_by_name(output_name)
        doubled = tf.raw_ops.AddV2(x=tensor, y=tensor, name=tensor.op.name)
    assert doubled.op.name != tensor.op.name
    once, twice = Runner(ours)({input_name: DATA}, [output_name, doubled.name])
    np.testing.assert_array_equal(twice, 2 * once)


def test_a_runnable_graph_computes_what_the_plain_import_does(recurrent):
    graph, input_name, output_name = recurrent
    plain, ours = (
        Runner(form)({input_name: DATA}, [output_name])[0]
        for form in (plainly_imported(graph), import_runnable(graph))
    )
    np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("passes", [["function"], ["pruning", "constfold"]], ids=" ".join)
def test_offline_passes_equal_those_on_an_exported_meta_graph(recurrent, passes):
    graph, input_name, output_name = recurrent
    plain = plainly_imported(graph)
    with plain.as_default():
        meta = tf.compat.v1.train.export_meta_graph(graph_def=graph, graph=plain)
    ends = [name.split(":")[0] for name in (output_name, input_name)]
    meta.collection_def["train_op"].node_list.value.extend(ends)
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.optimizers.extend(passes)
    rewrites.meta_optimizer_iterations, rewrites.min_graph_nodes = 2, -1
    expected = tf_optimizer.OptimizeGraph(config, meta)
    optimized = run_offline_passes(graph, passes, [input_name], [output_name])
    assert optimized.SerializeToString(deterministic=True) == expected.SerializeToString(
        deterministic=True
    )


def test_a_graph_that_is_not_valid_is_refused_before_any_pass(recurrent):
    graph, input_name, output_name = recurrent
    broken = tf.compat.v1.GraphDef.FromString(graph.SerializeToString())
    broken.node[-1].input[0] = "missing"
    for importer in (import_graph, import_runnable):
        with pytest.raises(ValueError, match="missing"):
            importer(broken)
    with pytest.raises(ValueError, match="missing"):
        run_offline_passes(broken, ["pruning"], [input_name], [output_name])
