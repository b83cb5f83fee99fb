"""Results of single ops, against figures of numpy."""

from __future__ import annotations

import numpy as np
import pytest
from keras_nets import channels_last

from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerRescale
from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.adaptors.litert.layer_params import with_layer_params
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.core.precision import Precision
from neural_mp.testing import machine, uniform
from neural_mp.tuning.measurement.comparison import compare_models

ADAPTOR = LiteRtAdaptor()
IMAGES = channels_last()[1].images[:64]


@pytest.fixture(scope="module")
def float_net(deep):
    return ADAPTOR.load(deep, example=IMAGES)


@pytest.fixture(scope="module")
def observations(float_net):
    return ADAPTOR.observe(float_net, [IMAGES], ADAPTOR.space(float_net, machine()))


@pytest.fixture(scope="module")
def int8_net(float_net, observations):
    space = ADAPTOR.space(float_net, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    return ADAPTOR.convert(float_net, plan, observations, space)


def list_convolutions(model):
    return [op.name for op in ADAPTOR.graph(model) if op.type == "CONV_2D"]


def test_a_changed_layer_is_found_at_its_op(float_net):
    sixth = list_convolutions(float_net)[5]
    factors = np.full(32, 1.1)
    changed = with_layer_params(float_net, {sixth: LayerRescale(outputs=factors)})
    comparison = compare_models(
        LoadedModel(ADAPTOR, float_net), LoadedModel(ADAPTOR, changed), [IMAGES[:40], IMAGES[40:]]
    )
    assert comparison.first is not None
    assert comparison.first.name == sixth
    assert comparison.first.sqnr == pytest.approx(20, abs=1e-3)  # a tenth of the amplitude


def test_an_integer_convolution_equals_integer_arithmetic_to_a_step(
    deep, float_net, int8_net, observations
):
    first = list_convolutions(float_net)[0]
    structure = float_net.structure
    weight = structure.get_weight(first)  # [outputs, height, width, inputs]
    bias = structure.program.get_constant(structure.find_bias(first))
    x_scale, x_zero = affine(observations.ranges[float_net.signature.input_tensors[0]]["minmax"])
    y_scale, y_zero = affine(observations.ranges[first]["minmax"])
    steps = np.abs(weight).max((1, 2, 3)) / 127
    integers = np.rint(weight / steps[:, None, None, None])
    x = np.clip(np.rint(IMAGES / x_scale) + x_zero, -128, 127) - x_zero
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))
    sums = np.einsum("nhwcij,oijc->nhwo", windows, integers) + np.rint(bias / (x_scale * steps))
    expected = np.clip(np.rint(sums * (x_scale * steps / y_scale)) + y_zero, y_zero, 127)
    location = int8_net.results[first]
    (result,) = int8_net.make_runner([location.tensor], keeps_tensors=True)([IMAGES])
    assert result.dtype == np.int8
    assert np.abs(result - expected).max() <= 1


def affine(span: tuple[float, float]) -> tuple[float, int]:
    """Return scale and zero point of int8."""
    low, high = min(span[0], 0), max(span[1], 0)
    scale = (high - low) / 255
    return scale, round(-128 - low / scale)


def test_a_restored_model_has_the_same_results(float_net, int8_net, tmp_path):
    ADAPTOR.save(int8_net, tmp_path)
    reference = LoadedModel(ADAPTOR, float_net)
    restored = LoadedModel(ADAPTOR, ADAPTOR.restore(tmp_path))
    assert compare_models(reference, restored, [IMAGES]) == compare_models(
        reference, LoadedModel(ADAPTOR, int8_net), [IMAGES]
    )
