"""Values that are no tensors of floats, ops that ONNX has no schema of, opsets ahead of kernels."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_nets import MACHINE, Converted, graph, op, run
from zoo.onnx_ops import feeds_of, single_op_tests

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.graph import protos
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import ModelLoadError
from neural_mp.profiling.audit import audit_ops
from neural_mp.space import list_effective_ops
from neural_mp.testing import signal_to_noise, uniform

ROWS = {"x": np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32)}
DRAWN = np.random.default_rng(1)
WEIGHTS = {name: DRAWN.normal(size=(8, 8)).astype(np.float32) for name in "wv"}


def between_products(*nodes, opset=20, **constants):
    """A model of rows: a product into `a`, some nodes, a product of `b`."""
    chain = [op("MatMul", "x w", "a"), *nodes, op("MatMul", "b v", "y")]
    return graph(chain, {"x": ["n", 8]}, ["y"], {**WEIGHTS, **constants}, opset=opset)


needs_newest_opset = pytest.mark.skipif(
    onnx.defs.onnx_opset_version() < 28, reason="this release of ONNX has no opset 28"
)


def products_in_int8(model):
    converted = Converted(model, ROWS)
    assert converted.kernels["MatMulIntegerToFloat"] == 2
    np.testing.assert_array_equal(converted.reference, run(model, **ROWS)[0])
    assert signal_to_noise(converted.reference, converted.result) > 25


@needs_newest_opset
def test_an_opset_ahead_of_the_quantizing_kernels_is_lowered_and_that_is_said():
    model = between_products(op("Celu", "a", "b"), opset=28)
    products_in_int8(model)
    (warning,) = OnnxRuntimeAdaptor().load(model).warnings
    assert "opset 28 was lowered to" in warning


def with_space_to_depth(**attributes):
    nodes = [op("Reshape", "a form", "p"), op("SpaceToDepth", "p", "s", blocksize=2, **attributes)]
    nodes.append(op("Reshape", "s back", "b"))
    sizes = {"form": np.array([-1, 1, 4, 2]), "back": np.array([-1, 8])}
    return between_products(*nodes, opset=28, **sizes)


@needs_newest_opset
def test_what_the_newest_opset_adds_and_the_model_leaves_alone_is_no_obstacle():
    products_in_int8(with_space_to_depth())


@needs_newest_opset
def test_what_only_the_newest_opset_has_keeps_the_model_in_fp32_with_a_reason():
    loaded = OnnxRuntimeAdaptor().load(with_space_to_depth(mode="CRD"))
    capabilities = OnnxRuntimeAdaptor().space(loaded, MACHINE).capabilities
    assert {capability.configs for capability in capabilities.values()} == {(FP32,)}
    assert "defines SpaceToDepth differently" in capabilities["a"].refusal_reason(Precision.INT8)


@pytest.mark.parametrize(
    "nodes",
    [
        [op("SplitToSequence", "a", "s", axis=0), op("ConcatFromSequence", "s", "b", axis=0)],
        [op("Optional", "a", "o"), op("OptionalGetElement", "o", "b")],
        [
            op("SequenceEmpty", "", "e"),
            op("SequenceInsert", "e a", "s"),
            op("SequenceAt", "s place", "b"),
        ],
    ],
    ids=["split", "optional", "empty"],
)
def test_products_around_lists_of_tensors_are_converted(nodes):
    products_in_int8(between_products(*nodes, place=np.array(0)))


def test_products_behind_ops_of_the_runtime_itself_are_converted():
    model = between_products(op("Gelu", "a", "b", domain="com.microsoft"))
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    products_in_int8(model)


def as_sparse(array):
    (indices,) = np.nonzero(array.ravel())
    values = numpy_helper.from_array(array.ravel()[indices], "w")
    return helper.make_sparse_tensor(
        values, numpy_helper.from_array(indices.astype(np.int64), "places"), array.shape
    )


def with_sparse_weight(as_node):
    model = between_products(op("Relu", "a", "b"))
    dense = next(item for item in model.graph.initializer if item.name == "w")
    array = numpy_helper.to_array(dense) * (np.abs(numpy_helper.to_array(dense)) > 0.5)
    model.graph.initializer.remove(dense)
    if as_node:
        node = helper.make_node("Constant", [], ["w"], "w", sparse_value=as_sparse(array))
        model.graph.node.insert(0, node)
    else:
        model.graph.sparse_initializer.append(as_sparse(array))
    return model


@pytest.mark.parametrize("as_node", [False, True])
def test_sparse_weights_are_converted_as_dense_ones(as_node):
    products_in_int8(with_sparse_weight(as_node))


def test_sparse_weights_by_coordinates():
    model = with_sparse_weight(as_node=False)
    (sparse,) = model.graph.sparse_initializer
    flat = numpy_helper.to_array(sparse.indices)
    indices = np.stack(np.unravel_index(flat, (8, 8)), 1).astype(np.int64)
    sparse.indices.CopyFrom(numpy_helper.from_array(indices, "places"))
    products_in_int8(model)


@pytest.mark.parametrize(
    ("sizes", "match"), [([1 << 20, 1 << 20], "sizes"), ([2, 2], "indices|sizes")]
)
def test_sparse_weights_that_cannot_be_written_out_are_refused(sizes, match):
    model = with_sparse_weight(as_node=False)
    del model.graph.sparse_initializer[0].dims[:]
    model.graph.sparse_initializer[0].dims.extend(sizes)
    with pytest.raises(ModelLoadError, match=match):
        OnnxRuntimeAdaptor().load(model)


def test_sparse_weights_that_are_large_only_together_are_refused(monkeypatch):
    monkeypatch.setattr(protos, "RATIO_EXEMPT_ARRAY_BYTES", 1 << 20)
    array = np.zeros((256, 600), np.float32)
    array[0, 0] = 1
    model = with_sparse_weight(as_node=False)
    for number in range(2):
        sparse = as_sparse(array)
        sparse.values.name = f"unused {number}"
        model.graph.sparse_initializer.append(sparse)
    with pytest.raises(ModelLoadError, match="all sparse constants .* got 1228800 bytes"):
        OnnxRuntimeAdaptor().load(model)


def with_strings():
    model = between_products(op("Relu", "a", "b"))
    text = helper.make_tensor_value_info("s", TensorProto.STRING, ["n"])
    model.graph.input.append(text)
    model.graph.node.append(op("StringConcat", "s s", "t"))
    model.graph.output.append(helper.make_tensor_value_info("t", TensorProto.STRING, ["n"]))
    return model


def test_strings_and_whole_numbers_are_no_part_of_what_is_observed():
    model = with_strings()
    model.graph.node.append(op("ArgMax", "a", "best", axis=1, keepdims=0))
    model.graph.output.append(helper.make_tensor_value_info("best", TensorProto.INT64, ["n"]))
    feeds = {**ROWS, "s": np.array(list("abcd"), object)}
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model, example=feeds)
    graph = adaptor.graph(loaded)
    names = [*graph.inputs, *(node.name for node in graph)]
    observed = {name for name, _ in adaptor.observe_tensors(loaded, [feeds], names)}
    assert observed == {"x", "a", "b", "y"}
    assert adaptor.op_outputs.first_non_finite(loaded, feeds) is None


def test_a_model_without_inputs_runs():
    weight = {**WEIGHTS, "x": ROWS["x"]}
    model = graph([op("MatMul", "x w", "a")], {}, ["a"], weight)
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model)
    for nothing in ({}, (), []):
        np.testing.assert_array_equal(adaptor.predict(loaded, nothing), run(model)[0])


def test_an_example_that_is_a_list_of_tensors_is_resized_as_it_is():
    value = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, ["m", 8])
    graph_proto = helper.make_graph(
        [op("ConcatFromSequence", "x", "a", axis=0), op("MatMul", "a w", "y")],
        "lists",
        [value],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(WEIGHTS["w"], "w")],
    )
    model = helper.make_model(
        graph_proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=10
    )
    feeds = {"x": [ROWS["x"], ROWS["x"][:1]]}
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model, example=feeds)
    np.testing.assert_array_equal(adaptor.predict(loaded, feeds), run(model, **feeds)[0])
    (listed,) = adaptor.example_inputs(loaded, 3)
    assert [part.shape for part in listed] == [(4, 8), (1, 8)]


def branch(kind, result):
    """A body of one op on the outer `a`."""
    nodes = [op(kind, "a v" if kind == "MatMul" else "a", result)]
    output = helper.make_tensor_value_info(result, TensorProto.FLOAT, None)
    return helper.make_graph(nodes, f"{kind} body", [], [output])


def choosing(condition, result="b"):
    bodies = {"then_branch": branch("MatMul", "p"), "else_branch": branch("Relu", "q")}
    return op("If", condition, result, **bodies)


@pytest.mark.parametrize(("told", "products"), [(True, 3), (False, 2)])
def test_the_branch_of_a_constant_condition_takes_the_place_of_the_if(told, products):
    model = between_products(choosing("told"), told=np.array(told))
    converted = Converted(model, ROWS)
    assert converted.kernels["MatMulIntegerToFloat"] == products
    assert "If" not in {node.op_type for node in converted.model.program.graph}
    np.testing.assert_array_equal(converted.reference, run(model, **ROWS)[0])
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_an_output_that_is_a_branchs_keeps_its_name():
    chain = [op("MatMul", "x w", "a"), choosing("told", "y")]
    model = graph(chain, {"x": ["n", 8]}, ["y"], {**WEIGHTS, "told": np.array(True)})
    converted = Converted(model, ROWS)
    assert [value.name for value in converted.model.program.graph.outputs] == ["y"]
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_a_branch_that_a_run_does_not_take_is_no_broken_promise():
    """Calibration takes both branches, the run that is audited takes one."""
    nodes = [op("ReduceSum", "a", "total", keepdims=0), op("Greater", "total zero", "large")]
    model = between_products(*nodes, choosing("large"), zero=np.float32(0))
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model)
    space = adaptor.space(loaded, MACHINE)
    batches = [{"x": ROWS["x"]}, {"x": -ROWS["x"]}]
    plan = space.resolve(uniform(space, Precision.INT8))
    converted = adaptor.convert(loaded, plan, adaptor.observe(loaded, batches, space), space)
    reached = [
        {
            op
            for op, outcome in adaptor.trace_kernels(converted, feeds).items()
            if outcome.was_executed
        }
        for feeds in batches
    ]
    assert reached[0] != reached[1]
    for feeds in batches:
        outcome = audit_ops(
            list_effective_ops(space, plan),
            adaptor.trace_kernels(converted, feeds),
            lambda _: False,
        )
        assert outcome.holds


@pytest.mark.slow
def test_bodies_of_an_opset_without_sequences_are_not_looked_into():
    (test,) = (t for t in single_op_tests()["Scan"] if t.name == "test_scan_sum")
    feeds = feeds_of(test)
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(test.model, example=feeds)
    graph = adaptor.graph(loaded)
    dict(adaptor.observe_tensors(loaded, [feeds], [op.name for op in graph]))
    results = adaptor.predict(loaded, feeds)
    for ours, theirs in zip(results, run(test.model, **feeds), strict=True):
        np.testing.assert_array_equal(ours, theirs)
