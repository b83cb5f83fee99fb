"""Bodies of Loop and Scan: their ops are converted like the ops around them."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from onnx_bodies import (
    BATCH,
    BOOL,
    FLOAT,
    HIDDEN,
    INT64,
    START,
    STEPS,
    WIDTH,
    U,
    W,
    body,
    draw,
    info,
    loop,
)
from onnx_nets import MACHINE, Converted, graph, op, run

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.profiler import iterate_own_times
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.testing import signal_to_noise

BF16, FP32, INT8 = Precision.BF16, Precision.FP32, Precision.INT8
X = draw(STEPS, BATCH, WIDTH)


def cell(state="s", source="x", result="next"):
    return [
        op("MatMul", f"{source} u", "a"),
        op("MatMul", f"{state} w", "b"),
        op("Add", "a b", "c"),
        op("Tanh", "c", result),
    ]


def scan(axis=0, direction=0, **settings):
    """A cell of an Elman network, its weights outside of the body."""
    inner = body([*cell(), op("Identity", "next", "out")], ["s", "x"], ["next", "out"])
    node = op(
        "Scan",
        "start steps",
        "last all",
        body=inner,
        num_scan_inputs=1,
        scan_input_axes=[axis],
        scan_input_directions=[direction],
    )
    node.name = "scan"
    return graph(
        [node, op("Relu", "all", "y"), op("Neg", "last", "z")],
        {"steps": [None, None, WIDTH]},
        ["y", "z"],
        {"w": W, "u": U, "start": np.zeros((BATCH, HIDDEN), np.float32)},
        **settings,
    )


def elman(steps):
    """Every state of the cell, by numpy."""
    state, states = np.zeros((BATCH, HIDDEN), np.float32), []
    for step in steps:
        state = np.tanh(step @ U + state @ W)
        states.append(state)
    return np.stack(states)


@pytest.mark.parametrize("precision", [INT8, BF16, Precision.FP16])
def test_the_body_of_a_scan_is_converted(precision):
    converted = Converted(scan(), {"steps": X}, precision)
    expected = np.maximum(elman(X), 0)
    assert signal_to_noise(expected, converted.result[0]) > 25
    assert converted.space.capabilities["scan/b"].config(precision) is not None


@pytest.mark.parametrize(("axis", "direction"), [(0, 1), (1, 0)])
def test_scans_over_other_axes_and_backwards(axis, direction):
    steps = np.moveaxis(X, 0, axis)
    converted = Converted(scan(axis, direction), {"steps": steps})
    expected = elman(X[::-1] if direction else X)
    assert signal_to_noise(np.maximum(expected, 0), converted.result[0]) > 25


def test_products_of_a_body_run_in_integer_kernels():
    converted = Converted(scan(), {"steps": X})
    ran = converted.adaptor.trace_kernels(converted.model, {"steps": X})
    assert {op: ran[op].precision for op in ("scan/a", "scan/b")} == {
        "scan/a": INT8,
        "scan/b": INT8,
    }
    # One kernel for every step.
    assert len(ran["scan/b"].kernels) == STEPS


def test_ranges_hold_what_all_steps_held():
    states = elman(X)
    converted = Converted(scan(), {"steps": X})
    low, high = converted.observed.ranges["scan/s"]["minmax"]
    assert low == pytest.approx(states[:-1].min(), rel=1e-5)
    assert high == pytest.approx(states[:-1].max(), rel=1e-5)


def test_an_op_of_a_body_takes_as_long_as_all_its_steps_and_its_runner_no_longer():
    """The profiler's account of a Scan of two steps, in microseconds."""
    events = [("a", "MatMul", 10, 3), ("b", "MatMul", 13, 4), ("a", "MatMul", 20, 3)]
    events += [("b", "MatMul", 24, 5), ("scan", "Scan", 9, 22), ("y", "Relu", 31, 2)]
    kernels = [
        {"name": name, "ts": begins, "dur": takes, "args": {"op_name": kind}}
        for name, kind, begins, takes in events
    ]
    seconds = Counter()
    for kernel, own in iterate_own_times(kernels):
        seconds[kernel["name"]] += own
    assert seconds == {"a": 6, "b": 9, "scan": 22 - 15, "y": 2}


def test_ops_of_bodies_are_timed():
    adaptor = OnnxRuntimeAdaptor()
    times = adaptor.time_ops(adaptor.load(scan()), {"steps": X}, 2)
    assert {"scan", "scan/a", "scan/b", "y"} <= times.keys()
    assert all(len(runs) == 2 for runs in times.values())


def test_ops_of_bodies_are_ops_of_the_graph():
    adaptor = OnnxRuntimeAdaptor()
    ops = adaptor.graph(adaptor.load(scan()))
    assert ops["scan/b"].inputs == ("scan/s",)
    assert ops["scan/b"].weights == W.size
    assert "scan/s" in ops.inputs
    assert {"scan/next", "scan/out"} & set(ops["scan"].inputs)


def test_a_loop_in_which_a_tensor_grows():
    nodes = [op("MatMul", "s w", "p"), op("Concat", "s p", "grown", axis=0)]
    model = loop(nodes, ["grown"])
    converted = Converted(model, START)
    assert converted.space.capabilities["loop/p"].config(INT8) is not None
    assert converted.result.shape == (8 * BATCH, HIDDEN)
    assert signal_to_noise(run(model, **START)[0], converted.result) > 25
    grown = np.concatenate([START["start"], START["start"] @ W])
    grown = np.concatenate([grown, grown @ W])
    assert converted.observed.ranges["loop/s"]["minmax"][1] == pytest.approx(grown.max())


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_body_with_a_tensor_of_an_unknown_number_of_axes_is_converted(tmp_path):
    counts = body(
        [
            op("NonZero", "row", "places"),
            op("Squeeze", "places", "squeezed"),
            op("Cast", "squeezed", "numbers", to=FLOAT),
            op("ReduceSum", "numbers", "total", keepdims=0),
            op("Identity", "state", "same"),
        ],
        [info("state", FLOAT, [1]), info("row", FLOAT, [None])],
        [info("same", FLOAT, [1]), info("total", FLOAT, [])],
    )
    node = op("Scan", "start p", "last totals", body=counts, num_scan_inputs=1)
    model = graph(
        [op("MatMul", "x u", "h"), op("Relu", "h", "r"), op("MatMul", "r w", "p"), node],
        {"x": ["batch", WIDTH]},
        ["p", "totals"],
        {"w": W, "u": U, "start": np.zeros(1, np.float32)},
    )
    x = draw(BATCH, WIDTH, seed=7)
    options = {"precisions": "int8", "objective": "modelsize", "workspace": tmp_path}
    result = MixedPrecision(model=model, calib_dataloader=[({"x": x}, None)], **options)()
    assert result.plan.counts()[INT8] == 2
    for expected, output in zip(run(model, x=x), result({"x": x}), strict=True):
        assert signal_to_noise(expected, np.asarray(output)) > 25


def nested(kind):
    """A product within a body within another body."""
    if kind == "If in Loop":
        choice = op(
            "If",
            "go",
            "next",
            then_branch=body([op("MatMul", "s w", "p"), op("Tanh", "p", "t")], [], ["t"]),
            else_branch=body([op("Neg", "s", "t")], [], ["t"]),
        )
        return loop([choice], ["next"])
    inner = op(
        "Loop",
        "turns - s",
        "far",
        body=body(
            [op("Identity", "on", "yet"), op("MatMul", "t w", "p"), op("Tanh", "p", "next")],
            [info("count", INT64, []), info("on", BOOL, []), "t"],
            [info("yet", BOOL), "next"],
        ),
    )
    if kind == "Loop in Loop":
        return loop([inner], ["far"])
    step = body(
        [op("MatMul", "t w", "p"), op("Tanh", "p", "next"), op("Identity", "next", "out")],
        [info("t", FLOAT, [BATCH, HIDDEN]), info("x", FLOAT, [BATCH, HIDDEN])],
        [info("next", FLOAT, [BATCH, HIDDEN]), info("out", FLOAT, [BATCH, HIDDEN])],
    )
    steps = op("Unsqueeze", "s axis", "u")
    scanned = op("Scan", "s u", "far all", body=step, num_scan_inputs=1)
    return loop([steps, scanned], ["far"], constants={"axis": np.array([0])})


@pytest.mark.parametrize("kind", ["If in Loop", "Loop in Loop", "Scan in Loop"])
@pytest.mark.parametrize("precision", [INT8, BF16])
def test_bodies_within_bodies(kind, precision):
    model = nested(kind)
    converted = Converted(model, START, precision)
    (product,) = (name for name in converted.float.structure.nodes if name.endswith("/p"))
    assert product.startswith("loop/")
    assert converted.space.capabilities[product].config(precision) is not None
    ran = converted.adaptor.trace_kernels(converted.model, START)[product]
    assert ran.precision is INT8 if precision is INT8 else ran.rounded_to is BF16
    assert signal_to_noise(run(model, **START)[0], converted.result) > 20


def test_weights_computed_of_constants_within_a_body_are_weights():
    """As torch writes an LSTM whose gates it puts into another order."""
    swap = [op("Slice", "w first last", "half"), op("Concat", "rest half", "turned", axis=0)]
    swap.insert(0, op("Slice", "w last end", "rest"))
    model = loop(
        [*swap, op("MatMul", "s turned", "p"), op("Tanh", "p", "next")],
        ["next"],
        constants={
            "first": np.array([0]),
            "last": np.array([HIDDEN // 2]),
            "end": np.array([HIDDEN]),
        },
    )
    converted = Converted(model, START)
    assert converted.space.capabilities["loop/p"].config(INT8) is not None
    assert signal_to_noise(run(model, **START)[0], converted.result) > 25


def test_a_model_with_bodies_comes_back_from_its_folder(tmp_path):
    converted = Converted(scan(), {"steps": X})
    adaptor = converted.adaptor
    adaptor.save(converted.model, tmp_path)
    again = adaptor.restore(tmp_path)
    for output, expected in zip(
        adaptor.predict(again, {"steps": X}), converted.result, strict=True
    ):
        np.testing.assert_array_equal(output, expected)
    assert adaptor.trace_kernels(again, {"steps": X}) == adaptor.trace_kernels(
        converted.model, {"steps": X}
    )
    adaptor.single_file.save_file(converted.model, tmp_path / "alone.onnx", {})
    (first, _) = run(str(tmp_path / "alone.onnx"), steps=X)
    np.testing.assert_array_equal(first, converted.result[0])


def test_a_converted_body_takes_less_room():
    converted = Converted(scan(), {"steps": X})
    size = converted.adaptor.weight_bytes
    weights = W.nbytes + U.nbytes
    assert size(converted.float) - size(converted.model) > 0.6 * weights


def test_what_ops_of_a_body_compute_can_be_compared():
    converted = Converted(scan(), {"steps": X})
    adaptor = converted.adaptor
    output, reference = (
        adaptor.op_outputs.op_outputs(model, ["scan/next"])({"steps": X})["scan/next"]
        for model in (converted.model, converted.float)
    )
    states = elman(X).reshape(-1, HIDDEN)
    np.testing.assert_allclose(reference.real, states, 1e-4, 1e-5)
    assert signal_to_noise(states, output.real) > 25


def test_the_first_result_that_is_no_number_may_lie_in_a_body():
    model = loop([op("Log", "s", "bad"), op("MatMul", "bad w", "next")], ["next"])
    adaptor = OnnxRuntimeAdaptor()
    start = {"start": np.full((BATCH, HIDDEN), -1, np.float32)}
    assert adaptor.op_outputs.first_non_finite(adaptor.load(model), start) == "loop/bad"


def test_weights_of_bodies_are_made_right_everywhere():
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(scan())
    space = adaptor.space(loaded, MACHINE.for_target("vnni"))
    config = space.capabilities["scan/b"].config(INT8)
    wide = replace(config, weight=QuantSpec("int8", "symmetric", "per_channel"))
    observations = adaptor.observe(loaded, [{"steps": X}], space)
    plan = space.resolve(PrecisionPlan({"scan/b": wide}))
    converted = adaptor.convert(loaded, plan, observations, space)
    assert adaptor.portability.full_range_kernels(converted) == {KernelKind.DENSE}
    right = adaptor.portability.with_reduced_range(converted)
    assert not adaptor.portability.full_range_kernels(right)
    assert signal_to_noise(np.maximum(elman(X), 0), adaptor.predict(right, {"steps": X})[0]) > 25


def test_one_op_of_a_body_alone():
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(scan())
    space = adaptor.space(loaded, MACHINE)
    observations = adaptor.observe(loaded, [{"steps": X}], space)
    config = space.capabilities["scan/b"].config(INT8)
    plan = space.resolve(PrecisionPlan({"scan/b": config, "scan/a": OpConfig(FP32)}))
    converted = adaptor.convert(loaded, plan, observations, space)
    ran = adaptor.trace_kernels(converted, {"steps": X})
    assert (ran["scan/a"].precision, ran["scan/b"].precision) == (FP32, INT8)
