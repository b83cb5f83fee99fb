"""Models of dynamic shape: compiled for the example, right for every shape."""

from __future__ import annotations

import os

import ml_dtypes
import numpy as np
import pytest
import torch

from neural_mp import MixedPrecision, load
from neural_mp.adaptors.common.kernels.runtime_probe import ONEDNN_LIMIT
from neural_mp.adaptors.openvino import runtime
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import Runner, ShapedRunner, ops, ov
from neural_mp.core.hardware import detect
from neural_mp.errors import ConversionError

WEIGHT = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)


def _dense():
    parameter = ops.parameter([-1, 5], np.float32, name="x")
    product = ops.matmul(parameter, ops.constant(WEIGHT), False, False)
    return ov.Model([product], [parameter], "dense")


@pytest.fixture
def compiled(monkeypatch):
    """The shapes that models are compiled for, in order; None for a dynamic shape."""
    shapes = []

    class Noted(Runner):
        def __init__(self, model, **options):
            shape = model.inputs[0].partial_shape
            shapes.append(None if shape.is_dynamic else tuple(shape.to_shape()))
            super().__init__(model, **options)

    monkeypatch.setattr(runtime, "Runner", Noted)
    return shapes


def _check(run, rows, times=1):
    x = np.random.default_rng(rows).normal(size=(rows, 5)).astype(np.float32)
    for _ in range(times):
        np.testing.assert_allclose(run([x])[0], x @ WEIGHT, rtol=1e-5, atol=1e-6)


def test_calls_with_the_shapes_of_the_example_need_a_single_compilation(compiled):
    run = ShapedRunner(_dense(), ((4, 5),))
    _check(run, 4, times=3)
    assert compiled == [(4, 5)]


def test_attention_is_compiled_for_the_example_with_the_same_results(compiled):
    states = ops.parameter([-1, 2, -1, 8], np.float32, name="x")
    attention = ops.scaled_dot_product_attention(states, states, states)
    model = ov.Model([attention], [states], "attention")
    x = np.random.default_rng(0).normal(size=(3, 2, 7, 8)).astype(np.float32)
    fixed, dynamic = (ShapedRunner(model, (shape,))([x])[0] for shape in (x.shape, (1, 2, 1, 8)))
    expected = torch.nn.functional.scaled_dot_product_attention(*[torch.from_numpy(x)] * 3)
    assert compiled == [x.shape, None]
    for result in (fixed, dynamic):
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_other_shapes_run_the_dynamic_model(compiled):
    run = ShapedRunner(_dense(), ((4, 5),))
    for rows in (2, 4, 3, 4, 7):
        _check(run, rows)
    assert compiled == [None, (4, 5)]


def test_results_do_not_depend_on_earlier_calls():
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    fresh, used = (ShapedRunner(_dense(), ((4, 5),)) for _ in range(2))
    for rows in (1, 2, 3):
        _check(used, rows)
    np.testing.assert_array_equal(fresh([x])[0], used([x])[0])


def test_inputs_that_the_model_cannot_take_are_reported_as_before(compiled):
    run = ShapedRunner(_dense(), ((7,),))
    with pytest.raises(ConversionError, match="OpenVINO fails to run"):
        run([np.ones(7, np.float32)])
    _check(run, 4)
    assert compiled == [None]


def test_streams_hold_for_the_model_of_a_fixed_shape():
    run = ShapedRunner(_dense(), ((4, 5),), streams=2)
    _check(run, 4, times=3)


def test_a_model_with_casts_of_the_user_to_bfloat16_stays_dynamic(compiled):
    parameter = ops.parameter([-1, 5], np.float32, name="x")
    rounded = ops.convert(ops.convert(parameter, ov.Type.bf16), ov.Type.f32)
    model = ov.Model([rounded], [parameter], "casts")
    run = ShapedRunner(model, ((4, 5),))
    x = np.random.default_rng(0).normal(size=(4, 5)).astype(np.float32)
    (output,) = run([x])
    np.testing.assert_array_equal(output, Runner(model)([x])[0])
    # Without AVX-512, the plugin leaves out the casts.
    if ONEDNN_LIMIT not in os.environ and "avx512f" in detect().flags:
        np.testing.assert_array_equal(output, output.astype(ml_dtypes.bfloat16).astype(np.float32))
    np.testing.assert_allclose(output, x, rtol=2**-7)
    assert compiled == [None]


@pytest.mark.usefixtures("quick_runs")
def test_a_torch_module_runs_in_the_form_of_the_batches_of_its_data(compiled, tmp_path):
    """Its capture has a smaller example than the data."""
    torch.manual_seed(0)
    converter = MixedPrecision(
        model=torch.nn.Linear(5, 3).eval(),
        runtime="openvino",
        precisions="int8",
        objective="modelsize",
        workspace=tmp_path / "workspace",
    )
    converter.calib_dataloader = [torch.randn(8, 5) for _ in range(2)]
    converter().save(tmp_path / "saved")
    result = load(tmp_path / "saved")
    compiled.clear()
    assert tuple(result(torch.randn(8, 5)).shape) == (8, 3)
    assert compiled == [(8, 5)]


def _dense_of_two_rows():
    """A model of any number of rows by its input, and of two by its weight."""
    parameter = ops.parameter([-1, 5], np.float32, name="x")
    dense = ops.matmul(parameter, ops.constant(WEIGHT), False, False)
    product = ops.matmul(ops.constant(np.eye(2, dtype=np.float32)), dense, False, False)
    return ov.Model([product], [parameter], "dense")


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_of_impossible_shapes_raises_and_leaves_later_calls_right(threads):
    first, adaptor = ShapedRunner(_dense(), ((4, 5),)), OpenVinoAdaptor()
    with adaptor.threads(threads):
        run = ShapedRunner(_dense_of_two_rows(), ((4, 5),))
        _check(run, 2)
        for _ in range(2):
            with pytest.raises(ConversionError, match="fails to run"):
                run([np.ones((3, 5), np.float32)])
            _check(run, 2, times=2)
        del run
        _check(first, 4)
        _check(ShapedRunner(_dense(), ((4, 5),)), 3)
