"""Branches of If are converted like the ops around them, as far as calibration takes them."""

import numpy as np
import pytest
from onnx_bodies import (
    BATCH,
    BOOL,
    IMAGE,
    START,
    STEPS,
    WIDTH,
    W,
    body,
    draw,
    info,
)
from onnx_nets import MACHINE, Converted, graph, op, run

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.precision import Precision
from neural_mp.space import limit_to_reached
from neural_mp.testing import signal_to_noise

BF16, FP32, INT8 = Precision.BF16, Precision.FP32, Precision.INT8
X = draw(STEPS, BATCH, WIDTH)


def branches(then, otherwise, behind=(), output="y", constants=None):
    """A model of two branches, told by an input which is to be taken."""
    node = op(
        "If",
        "chosen",
        "i",
        then_branch=body(then, [], ["result"]),
        else_branch=body(otherwise, [], ["result"]),
    )
    node.name = "either"
    model = graph(
        [*behind[:1], node, *behind[1:], op("Identity", "i", output)],
        {"x": ["n", 3, 8, 8]},
        [output],
        {"w": draw(4, 3, 3, 3), "v": draw(4, 3, 3, 3, seed=4), **(constants or {})},
    )
    model.graph.input.append(info("chosen", BOOL, []))
    return model


def feeds(chosen):
    return {"x": IMAGE, "chosen": np.array(chosen)}


def two_convolutions():
    """Branches in which everything has the same names."""
    return branches(
        [op("Conv", "x w", "c"), op("Relu", "c", "result")],
        [op("Conv", "x v", "c"), op("Relu", "c", "result")],
    )


@pytest.mark.parametrize("chosen", [True, False])
def test_a_branch_that_calibration_takes_is_converted_and_the_other_one_stays(chosen):
    model = two_convolutions()
    converted = Converted(model, feeds(chosen))
    active, inactive = ("either/c", "either/c_1") if chosen else ("either/c_1", "either/c")
    ran = converted.adaptor.trace_kernels(converted.model, feeds(chosen))
    assert ran[active].precision is INT8
    assert "not reached by calibration" in converted.space.capabilities[inactive].reasons[INT8]
    assert signal_to_noise(run(model, **feeds(chosen))[0], converted.result) > 30
    # The branch that stays computes what it did.
    untaken = converted.adaptor.predict(converted.model, feeds(not chosen))
    np.testing.assert_allclose(untaken, run(model, **feeds(not chosen))[0], 1e-4, 1e-5)


def test_both_branches_are_converted_where_calibration_takes_both():
    model = two_convolutions()
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model)
    space = adaptor.space(loaded, MACHINE)
    observations = adaptor.observe(loaded, [feeds(True), feeds(False)], space)
    space = limit_to_reached(space, observations.ranges)
    converted = adaptor.convert(loaded, space.resolve(space.fastest_plan()), observations, space)
    for chosen, name in ((True, "either/c"), (False, "either/c_1")):
        assert adaptor.trace_kernels(converted, feeds(chosen))[name].precision is INT8
        expected = run(model, **feeds(chosen))[0]
        assert signal_to_noise(expected, adaptor.predict(converted, feeds(chosen))) > 30


def test_what_both_branches_read_is_quantized_once():
    model = branches(
        [op("Conv", "r w", "result")],
        [op("Conv", "r v", "result")],
        behind=[op("Relu", "x", "r")],
    )
    adaptor = OnnxRuntimeAdaptor()
    loaded = adaptor.load(model)
    space = adaptor.space(loaded, MACHINE)
    observations = adaptor.observe(loaded, [feeds(True), feeds(False)], space)
    converted = adaptor.convert(loaded, space.resolve(space.fastest_plan()), observations, space)
    assert converted.counts.quantize == 1
    for chosen in (True, False):
        expected = run(model, **feeds(chosen))[0]
        assert signal_to_noise(expected, adaptor.predict(converted, feeds(chosen))) > 30


def test_one_weight_of_the_graph_in_two_bodies():
    model = branches(
        [op("Conv", "x w", "c"), op("Relu", "c", "result")], [op("Conv", "x w", "result")]
    )
    converted = Converted(model, feeds(True))
    assert signal_to_noise(run(model, **feeds(True))[0], converted.result) > 30
    output = converted.adaptor.predict(converted.model, feeds(False))
    np.testing.assert_allclose(output, run(model, **feeds(False))[0], 1e-4, 1e-5)


def test_a_branch_within_a_scan_is_not_looked_into_and_takes_its_ranges_as_it_runs():
    product = [op("Sin", "s", "q"), op("MatMul", "q w", "p"), op("Tanh", "p", "t")]
    choice = op(
        "If",
        "yes",
        "next",
        then_branch=body(product, [], ["t"]),
        else_branch=body([op("Neg", "s", "t")], [], ["t"]),
    )
    inner = body([choice, op("Identity", "next", "out")], ["s", "x"], ["next", "out"])
    node = op("Scan", "start x", "last all", body=inner, num_scan_inputs=1)
    node.name = "scan"
    condition = [op("ReduceSum", "x", "sum", keepdims=0), op("Less", "sum huge", "yes")]
    model = graph(
        [*condition, node, op("Relu", "last", "y")],
        {"x": [STEPS, BATCH, WIDTH]},
        ["y"],
        {"w": W, "start": START["start"], "huge": np.float32(1e9)[()].reshape(())},
    )
    converted = Converted(model, {"x": X})
    (product,) = (name for name in converted.float.structure.nodes if name.endswith("/p"))
    config = converted.space.capabilities[product].config(INT8)
    assert config.approach == "dynamic"
    assert converted.adaptor.trace_kernels(converted.model, {"x": X})[product].precision is INT8
    assert signal_to_noise(run(model, x=X)[0], converted.result) > 25


def test_the_users_model_stays_as_it_is():
    model = two_convolutions()
    original = model.SerializeToString(deterministic=True)
    Converted(model, feeds(True))
    assert model.SerializeToString(deterministic=True) == original


def test_branches_without_calibration_are_reported(tmp_path):
    converter = MixedPrecision()
    converter.model = two_convolutions()
    converter.precisions = "int8"
    converter.calib_dataloader = [feeds(True)]
    converter.workspace = tmp_path
    result = converter()
    assert result.plan.counts() == {INT8: 1, FP32: 1}
    (warning,) = (line for line in result.report.warnings if "calibration did not reach" in line)
    assert "'either/c_1'" in warning
    for chosen in (True, False):
        expected = run(two_convolutions(), **feeds(chosen))[0]
        assert signal_to_noise(expected, result(feeds(chosen))) > 30
