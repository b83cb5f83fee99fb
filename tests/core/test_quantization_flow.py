"""Hand-derived consequences of plans: what is quantized, what runs along, what stays out."""

from dataclasses import replace

from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import (
    find_observable_tensors,
    find_quantized_tensors,
    propagate_quantization,
)

INT8, BF16, FP16, FP32 = Precision.INT8, Precision.BF16, Precision.FP16, Precision.FP32

CHAIN = OpGraph(
    [
        Op("conv1", "conv", ("x",)),
        Op("relu1", "relu", ("conv1",), fusion_group="conv1"),
        Op("pool", "max_pool", ("relu1",), quantize_agnostic=True),
        Op("conv2", "conv", ("pool",)),
        Op("relu2", "relu", ("conv2",), fusion_group="conv2"),
        Op("mean", "mean", ("relu2",)),
        Op("fc", "linear", ("mean",)),
    ],
    ["x"],
    ["fc"],
)
RESIDUAL = OpGraph(
    [
        Op("stem", "conv", ("x",)),
        Op("a", "conv", ("stem",)),
        Op("b", "conv", ("a",)),
        Op("add", "add", ("b", "stem"), fusion_group="b"),
        Op("relu", "relu", ("add",), fusion_group="b"),
        Op("c", "conv", ("relu",)),
    ],
    ["x"],
    ["c"],
)
#: Additions with a kernel of their own, as ONNX Runtime has them.
JOINED = OpGraph(
    [
        Op("stem", "Conv", ("x",), writes_int8=True),
        Op("a", "Conv", ("stem",), writes_int8=True),
        Op("add", "Add", ("a", "stem"), joins_int8=True),
        Op("relu", "Relu", ("add",), fusion_group="add"),
        Op("b", "Conv", ("relu",), writes_int8=True),
        Op("sum", "Add", ("b", "relu"), joins_int8=True),
        Op("mean", "mean", ("sum",)),
    ],
    ["x"],
    ["mean"],
)


def test_all_int8_passes_integers_from_kernel_to_kernel():
    flow = propagate_quantization(CHAIN, {"conv1": INT8, "conv2": INT8, "fc": INT8})
    assert flow.effective == {
        **dict.fromkeys(["conv1", "relu1", "pool", "conv2", "relu2", "fc"], INT8),
        "mean": FP32,
    }
    # relu2 is read by a float op only, so its kernel writes floats.
    assert flow.int8_outputs == {"relu1", "pool"}
    # Pooling selects values: what comes out carries the scale of what went in.
    assert flow.scale_owner == {"x": "x", "relu1": "relu1", "pool": "relu1", "mean": "mean"}


def test_putting_the_only_reader_back_to_float_takes_the_quantization_away():
    flow = propagate_quantization(CHAIN, {"conv1": INT8, "conv2": FP32, "fc": FP32})
    assert flow.int8_outputs == frozenset()
    assert set(flow.scale_owner) == {"x"}
    assert flow.effective["relu1"] is INT8  # still part of the kernel
    assert flow.effective["pool"] is FP32


def test_a_float_writer_is_quantized_behind_the_pooling():
    flow = propagate_quantization(CHAIN, {"conv1": FP32, "conv2": INT8, "fc": FP32})
    assert flow.scale_owner == {"pool": "pool"}
    assert flow.effective["pool"] is FP32


def test_a_cluster_can_be_split_by_naming_its_activation():
    flow = propagate_quantization(CHAIN, {"conv1": INT8, "relu1": FP32, "conv2": INT8, "fc": FP32})
    assert flow.effective["relu1"] is FP32
    assert "conv1" not in flow.int8_outputs


def test_int8_on_an_op_that_nothing_runs_in_int8_is_float():
    assert propagate_quantization(CHAIN, {"mean": INT8, "pool": INT8}).effective["pool"] is FP32


def test_a_residual_sum_is_quantized_only_if_its_result_is():
    everything = {name: INT8 for name in ("stem", "a", "b", "c")}
    flow = propagate_quantization(RESIDUAL, everything)
    assert flow.int8_reads["add"] == {"stem"}
    assert flow.int8_outputs == {"stem", "a", "relu"}
    float_behind = propagate_quantization(RESIDUAL, {**everything, "c": FP32})
    assert "add" not in float_behind.int8_reads
    assert float_behind.int8_outputs == {"stem", "a"}


def test_a_sum_that_rounds_its_terms_has_a_scale_for_the_term_of_its_own_kernel():
    ops = [replace(op, quantizes_terms=op.name == "add") for op in RESIDUAL]
    graph = OpGraph(ops, ["x"], ["c"])
    everything = {name: INT8 for name in ("stem", "a", "b", "c")}
    flow = propagate_quantization(graph, everything)
    plain = propagate_quantization(RESIDUAL, everything)
    assert set(flow.scale_owner) - set(plain.scale_owner) == {"b"}
    assert (flow.int8_reads, flow.int8_outputs) == (plain.int8_reads, plain.int8_outputs)
    in_float = propagate_quantization(graph, {**everything, "c": FP32})
    assert "b" not in in_float.scale_owner
    int8_ops = frozenset(everything)
    observed = find_observable_tensors(graph, int8_ops)
    assert observed - find_observable_tensors(RESIDUAL, int8_ops) == {"b"}
    # Its noise is part of that of the sum: no plan can take it away alone.
    assert find_quantized_tensors(graph, int8_ops) == find_quantized_tensors(RESIDUAL, int8_ops)


def test_the_readers_and_the_writer_of_a_tensor_belong_together():
    tensors = {
        t.name: t for t in find_quantized_tensors(RESIDUAL, frozenset({"stem", "a", "b", "c"}))
    }
    assert tensors["stem"].ops == {"stem", "a", "b"}
    assert tensors["x"].producers == ()
    assert tensors["relu"].ops == {"b", "c"}


def test_all_tensors_some_plan_may_quantize_are_observed():
    assert find_observable_tensors(CHAIN, frozenset({"conv1", "conv2", "fc"})) == {
        "x",
        "relu1",
        "pool",
        "mean",
    }
    assert find_observable_tensors(CHAIN, frozenset({"conv2"})) == {"relu1", "pool"}


def writing_int8_only(graph: OpGraph) -> OpGraph:
    """The same graph, its convolutions without a kernel that writes floats."""
    ops = [replace(op, writes_int8=op.type == "conv") for op in graph]
    return OpGraph(ops, graph.inputs, graph.outputs)


def test_kernels_that_write_int8_only_quantize_what_nobody_reads_so():
    flow = propagate_quantization(writing_int8_only(RESIDUAL), {"b": INT8})
    assert flow.int8_outputs == {"relu"}
    assert flow.int8_reads == {"b": {"a"}, "add": {"stem"}}
    assert set(flow.scale_owner) == {"a", "stem", "relu"}


def test_their_results_are_observed_and_belong_to_their_writers():
    graph = writing_int8_only(CHAIN)
    assert find_observable_tensors(graph, frozenset({"conv2"})) == {"relu1", "pool", "relu2"}
    tensors = {t.name: t for t in find_quantized_tensors(graph, frozenset({"conv2"}))}
    assert tensors["relu2"].producers == ("conv2",)
    assert tensors["relu2"].consumers == ()
    assert set(tensors) == {"pool", "relu2"}


def all_joined(**overrides: Precision) -> dict[str, Precision]:
    return {**dict.fromkeys(["stem", "a", "add", "b", "sum"], INT8), **overrides}


def test_an_addition_between_integers_reads_and_writes_them_each_with_a_scale_of_its_own():
    flow = propagate_quantization(JOINED, all_joined())
    assert flow.int8_reads["add"] == {"a", "stem"}
    assert "relu" in flow.int8_outputs
    assert "add" not in flow.int8_outputs  # inside of the kernel
    assert {name for name, root in flow.scale_owner.items() if name == root} == {
        "x",
        "stem",
        "a",
        "relu",
        "b",
        "sum",
    }


def test_an_addition_that_nothing_reads_in_integers_runs_in_float():
    free = OpGraph([replace(op, writes_int8=False) for op in JOINED], ["x"], ["mean"])
    flow = propagate_quantization(free, all_joined())
    assert flow.effective["sum"] is FP32
    assert "sum" not in flow.int8_reads
    without = propagate_quantization(free, all_joined(b=FP32))
    assert without.effective["add"] is without.effective["relu"] is FP32


def test_an_addition_of_what_can_only_be_written_in_integers_stays_there():
    flow = propagate_quantization(JOINED, all_joined())
    assert flow.effective["sum"] is INT8
    assert "sum" in flow.int8_outputs  # one tensor is dequantized for the mean, not two


def join_branches(**kernel: bool) -> OpGraph:
    """A sum that is read in float, of a pooled and a moved convolution with such a kernel."""
    ops = [
        Op("stem", "Conv", ("x",), writes_int8=True),
        Op("a", "Conv", ("stem",), **kernel),
        Op("up", "Resize", ("a",), quantize_agnostic=True),
        Op("b", "Conv", ("stem",), **kernel),
        Op("sum", "Add", ("up", "b"), joins_int8=True),
        Op("more", "Add", ("sum", "stem"), joins_int8=True),
        Op("mean", "mean", ("more",)),
    ]
    return OpGraph(ops, ["x"], ["mean"])


BRANCHES = dict.fromkeys(["stem", "a", "b", "sum", "more"], INT8)


def test_an_addition_of_what_may_be_written_in_integers_dequantizes_one_tensor():
    flow = propagate_quantization(join_branches(may_write_int8=True), BRANCHES)
    assert flow.int8_outputs == {"stem", "a", "up", "b", "sum", "more"}
    assert flow.effective["up"] is INT8


def test_an_addition_quantizes_no_float_for_itself_alone():
    flow = propagate_quantization(join_branches(), BRANCHES)
    assert flow.int8_outputs == {"stem"}
    assert flow.effective["sum"] is flow.effective["more"] is FP32
    in_float = {**BRANCHES, "b": FP32}
    flow = propagate_quantization(join_branches(may_write_int8=True), in_float)
    assert flow.int8_outputs == {"stem"}
    assert flow.effective["a"] is INT8


def test_an_addition_of_results_that_others_read_in_integers_runs_in_integers():
    others = [Op("first", "Conv", ("a",)), Op("second", "Conv", ("b",))]
    graph = OpGraph([*join_branches(), *others], ["x"], ["mean", "first", "second"])
    flow = propagate_quantization(graph, {**BRANCHES, "first": INT8, "second": INT8})
    assert flow.int8_outputs == {"stem", "a", "up", "b", "sum", "more"}


def test_the_noise_of_a_result_without_readers_in_integers_ends_with_its_writer():
    graph = join_branches(may_write_int8=True)
    tensors = {t.name: t for t in find_quantized_tensors(graph, frozenset(BRANCHES))}
    assert tensors["more"].quantizing_ops == ("more",)
    assert tensors["a"].quantizing_ops == ("sum",)


def test_an_addition_of_floats_runs_in_float_and_is_quantized_behind():
    flow = propagate_quantization(JOINED, all_joined(stem=FP32, a=FP32))
    assert flow.effective["add"] is FP32
    assert set(flow.scale_owner) == {"relu", "b"}


def test_an_addition_shares_the_tensors_it_reads_and_writes():
    tensors = {t.name: t for t in find_quantized_tensors(JOINED, frozenset(all_joined()))}
    assert tensors["a"].ops == {"a", "add"}
    assert tensors["relu"].ops == {"add", "b", "sum"}
    assert find_observable_tensors(JOINED, frozenset(all_joined())) == {
        "x",
        "stem",
        "a",
        "relu",
        "b",
        "sum",
    }
