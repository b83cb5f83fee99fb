"""Tables of embeddings and recurrent layers: floats outside, bytes inside."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx_nets import MACHINE, Converted, graph, op, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.testing import signal_to_noise

INT8 = Precision.INT8
ROWS, WIDTH, HIDDEN = 50, 16, 24


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def embedding(table, *behind, output="y"):
    """A model that reads rows of a table by number."""
    model = graph([op("Gather", "table i", "rows"), *behind], {}, [output], {"table": table})
    model.graph.input.append(
        onnx.helper.make_tensor_value_info("i", onnx.TensorProto.INT64, ["n", "m"])
    )
    return model


NUMBERS = {"i": np.random.default_rng(0).integers(0, ROWS, (3, 7))}


def test_rows_of_a_table_are_exact_to_half_a_step_of_their_own():
    table = draw(ROWS, WIDTH) * np.logspace(-3, 3, ROWS, dtype=np.float32)[:, None]
    converted = Converted(embedding(table, op("Identity", "rows", "y")), NUMBERS)
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    error = np.abs(converted.result - table[NUMBERS["i"]]) / step[NUMBERS["i"]]
    assert 0 < error.max() <= 0.5001
    assert converted.space.resolve(converted.space.fastest_plan()).plan.counts() == {INT8: 1}


def test_a_table_takes_a_quarter_and_four_bytes_a_row():
    table = draw(ROWS, WIDTH)
    converted = Converted(embedding(table, op("Relu", "rows", "y")), NUMBERS)
    adaptor = OnnxRuntimeAdaptor()
    assert adaptor.weight_bytes(converted.float) == table.nbytes
    assert adaptor.weight_bytes(converted.model) == ROWS * (WIDTH + 4)


def test_what_is_behind_a_table_reads_it_in_its_own_precision():
    table, weight = draw(ROWS, WIDTH), draw(WIDTH, 8, seed=1)
    model = embedding(table, op("MatMul", "rows weight", "y"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "weight"))
    for precision in (Precision.INT8, Precision.BF16):
        converted = Converted(model, NUMBERS, y=precision, rows=INT8)
        assert signal_to_noise(converted.reference, converted.result) > 30


def test_short_rows_would_grow_and_stay():
    converted = Converted(embedding(draw(ROWS, 4), op("Relu", "rows", "y")), NUMBERS)
    reason = converted.space.capabilities["rows"].reasons[INT8]
    assert "increase its size" in reason
    np.testing.assert_array_equal(converted.result, converted.reference)


def recurrent(kind="LSTM", directions=1, **attributes):
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[kind]
    constants = {
        "w": draw(directions, gates * HIDDEN, WIDTH, seed=1) / 4,
        "r": draw(directions, gates * HIDDEN, HIDDEN, seed=2) / 4,
        "b": draw(directions, 2 * gates * HIDDEN, seed=3) / 4,
    }
    if directions == 2:
        attributes["direction"] = "bidirectional"
    layer = op(kind, "x w r b", "all last", hidden_size=HIDDEN, **attributes)
    return graph(
        [layer, op("Relu", "all", "y"), op("Neg", "last", "z")],
        {"x": ["steps", "batch", WIDTH]},
        ["y", "z"],
        constants,
    )


STEPS = {"x": draw(12, 5, WIDTH)}


@pytest.mark.parametrize("directions", [1, 2])
def test_an_lstm_runs_in_the_kernel_that_finds_its_ranges(directions):
    model = recurrent(directions=directions)
    converted = Converted(model, STEPS)
    assert converted.kernels["DynamicQuantizeLSTM"] == 1
    assert converted.space.capabilities["all"].config(INT8).approach == "dynamic"
    expected = run(model, **STEPS)
    for reference, output in zip(expected, converted.result, strict=True):
        assert signal_to_noise(reference, output) > 30
    assert converted.adaptor.weight_bytes(converted.model) < 0.4 * converted.adaptor.weight_bytes(
        converted.float
    )


def test_an_lstm_is_right_wherever_it_is_loaded():
    """Weights of ±127 are right where products of bytes are exact; unsigned ones everywhere."""
    weight = QuantSpec("int8", "symmetric", "per_channel")
    model = recurrent()
    adaptor = OnnxRuntimeAdaptor()
    exact = replace(MACHINE, flags=frozenset({"avx2", "avx512f", "avx512_vnni"}))
    converted = Converted(model, STEPS, machine=exact.for_target("vnni"), weight=weight)
    assert adaptor.portability.full_range_kernels(converted.model) == {KernelKind.DENSE}
    right = adaptor.portability.with_reduced_range(converted.model)
    assert not adaptor.portability.full_range_kernels(right)
    expected = run(model, **STEPS)
    for reference, output in zip(expected, adaptor.predict(right, STEPS), strict=True):
        assert signal_to_noise(reference, output) > 30


def test_a_plain_recurrent_layer_stays_and_that_is_said():
    converted = Converted(recurrent("RNN"), STEPS)
    assert "no integer kernel" in converted.space.capabilities["all"].reasons[INT8]
    (warning,) = (line for line in converted.float.warnings if "RNN" in line)
    assert warning.startswith("1 RNN stays in FP32")


def with_all_inputs(kind, direction, lengths=True, start=True, **attributes):
    """A recurrent layer with lengths of its sequences and states to begin with; all its results."""
    gates, directions = {"LSTM": 4, "GRU": 3}[kind], 2 if direction == "bidirectional" else 1
    states = ["h", "c"] if kind == "LSTM" else ["h"]
    names = ["x", "w", "r", "b", "lengths" if lengths else "-", *(states if start else ())]
    results = ["all", "last", "cell"] if kind == "LSTM" else ["all", "last"]
    layer = op(
        kind,
        " ".join(names),
        " ".join(results),
        hidden_size=HIDDEN,
        direction=direction,
        **attributes,
    )
    model = graph(
        [layer, *(op("Identity", name, f"{name}_out") for name in results)],
        {
            "x": ["steps", "batch", WIDTH],
            **({s: [directions, "batch", HIDDEN] for s in states} if start else {}),
        },
        [f"{name}_out" for name in results],
        {
            "w": draw(directions, gates * HIDDEN, WIDTH, seed=1) / 4,
            "r": draw(directions, gates * HIDDEN, HIDDEN, seed=2) / 4,
            "b": draw(directions, 2 * gates * HIDDEN, seed=3) / 4,
        },
    )
    feeds = dict(STEPS)
    if start:
        feeds |= {s: draw(directions, 5, HIDDEN, seed=7 + i) for i, s in enumerate(states)}
    if lengths:
        model.graph.input.append(
            onnx.helper.make_tensor_value_info("lengths", onnx.TensorProto.INT32, ["batch"])
        )
        feeds["lengths"] = np.array([12, 3, 7, 1, 12], np.int32)
    return model, feeds


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(("lengths", "start"), [(False, False), (True, True), (False, True)])
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "GRU after"])
def test_recurrent_layers_with_lengths_and_states(kind, direction, lengths, start):
    attributes = {"linear_before_reset": 1} if kind.endswith("after") else {}
    model, feeds = with_all_inputs(kind.split()[0], direction, lengths, start, **attributes)
    converted = Converted(model, feeds)
    ran = converted.adaptor.trace_kernels(converted.model, feeds)["all"]
    assert ran.precision is INT8
    expected = run(model, **feeds)
    assert len(expected) == len(converted.result)
    for reference, output in zip(expected, converted.result, strict=True):
        assert reference.shape == output.shape
        assert signal_to_noise(reference, output) > 30
        # Behind the end of a sequence there is nothing.
        if lengths and reference.ndim == 4:
            assert not output[3:, :, 1].any()


def test_a_gru_is_timed_and_comes_back_as_one_op(tmp_path):
    model, feeds = with_all_inputs("GRU", "bidirectional")
    converted = Converted(model, feeds)
    adaptor = converted.adaptor
    # What it reads, and in each direction the state before and after the reset gate.
    assert converted.model.counts.quantize == 5
    timed = adaptor.time_ops(converted.model, feeds, 2)
    assert timed["all"][0] > 0
    assert not [name for name in timed if name.startswith("all/")]
    adaptor.save(converted.model, tmp_path)
    again = adaptor.restore(tmp_path)
    for output, expected in zip(adaptor.predict(again, feeds), converted.result, strict=True):
        np.testing.assert_array_equal(output, expected)
    assert adaptor.trace_kernels(again, feeds) == adaptor.trace_kernels(converted.model, feeds)
    weights = adaptor.weight_bytes(converted.float)
    assert adaptor.weight_bytes(converted.model) < 0.5 * weights


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"activations": ["HardSigmoid", "Tanh"]}, "activations"),
        ({"clip": 3.0}, "clips"),
    ],
)
def test_a_gru_that_computes_something_else_stays(attributes, why):
    converted = Converted(recurrent("GRU", **attributes), STEPS)
    assert why in converted.space.capabilities["all"].reasons[INT8]
    np.testing.assert_array_equal(converted.result[0], converted.reference[0])
