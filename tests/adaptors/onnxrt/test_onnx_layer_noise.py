"""Noise of stored weights without gradients: second moments of inputs, and the search on them."""

from __future__ import annotations

import numpy as np
import pytest
from onnx_nets import MACHINE, run
from onnx_words import IDS, WEIGHTS, plan_of, words

from neural_mp import convert_with_plan
from neural_mp.adaptors.common.sensitivity import (
    list_float_input_specs,
    measure_layer_noise,
)
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.enums import KernelInputs
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import make_weight_only
from neural_mp.errors import ConversionError


@pytest.fixture(scope="module")
def scored():
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(words(), example={"ids": IDS})
    space = adaptor.space(model, MACHINE).without_data()
    return adaptor, model, space, measure_layer_noise(adaptor, model, [{"ids": IDS}], space)


def test_every_weight_has_a_score_for_each_form_and_more_bits_have_less_noise(scored):
    _, _, space, scores = scored
    assert list(scores) == ["embed", "up", "down", "head"]
    for op, noises in scores.items():
        assert list(noises) == [str(spec) for spec in list_float_input_specs(space, op)]
        bits = {8: [], 4: [], 2: []}
        for spec in list_float_input_specs(space, op):
            bits[spec.dtype.bits].append(noises[str(spec)])
        assert 0 < max(bits[8]) < min(bits[4]) / 20 < 0.001
        assert not bits[2] or max(bits[4]) < min(bits[2]) / 5


@pytest.mark.parametrize("size", [64, 32])
def test_a_score_is_the_trace_with_the_second_moments_of_the_inputs(scored, size):
    *_, scores = scored
    weight = WEIGHTS["w_up"].T.astype(np.float64)
    grouped = weight.reshape(len(weight), -1, 32)  # 96 inputs: groups of 64 and of 32
    text = f"uint4 asymmetric per_group {size} minmax int8_inputs"
    if size == 64:
        grouped = np.pad(weight, ((0, 0), (0, 32))).reshape(len(weight), -1, 64)
    low, high = grouped.min(-1, keepdims=True).clip(max=0), grouped.max(-1, keepdims=True)
    step = (high.clip(min=0) - low) / 15
    zero = np.rint(-low / step)
    stored = (np.clip(np.rint(grouped / step) + zero, 0, 15) - zero) * step
    error = stored.reshape(len(weight), -1)[:, :96] - weight
    rows = WEIGHTS["table"][IDS.reshape(-1)].astype(np.float64)
    moments = rows.T @ rows
    expected = np.trace(error @ moments @ error.T) / np.trace(weight @ moments @ weight.T)
    # The score counts the rounding of the inputs, too: less than a hundredth of the weight's.
    assert scores["up"][text] == pytest.approx(expected, rel=0.02)


def test_the_score_of_the_last_layer_is_the_measured_noise_of_the_outputs(scored):
    adaptor, model, space, scores = scored
    (truth,) = run(words(), ids=IDS)
    for spec in list_float_input_specs(space, "head"):
        plan = space.resolve(PrecisionPlan({"head": make_weight_only(spec)}))
        converted = adaptor.convert(model, plan, Observations(), space)
        error = adaptor.predict(converted, {"ids": IDS}) - truth
        measured = np.square(error).sum() / np.square(truth).sum()
        assert scores["head"][str(spec)] == pytest.approx(measured, rel=0.02)


def test_rounded_inputs_add_their_noise(scored):
    adaptor, _, space, _ = scored
    noisy = WEIGHTS["w_head"].copy()
    noisy[0] *= 1e-3  # an input that hardly matters, but dominates the scale of its group
    loud = words(w_head=noisy, b_down=np.eye(1, 40, dtype=np.float32)[0] * 1e3)
    loaded = adaptor.load(loud, example={"ids": IDS})
    own = adaptor.space(loaded, MACHINE).without_data()
    scores = measure_layer_noise(adaptor, loaded, [{"ids": IDS}], own)
    spec = next(s for s in list_float_input_specs(space, "head") if s.dtype.bits == 8)
    assert spec.inputs is KernelInputs.INT8
    assert scores["head"][str(spec)] > 0.1
    converted = convert_with_plan(loud, plan_of({"head": ("int8", str(spec))}), inputs={"ids": IDS})
    (truth,) = run(loud, ids=IDS)
    measured = np.square(converted(IDS) - truth).sum() / np.square(truth).sum()
    assert scores["head"][str(spec)] == pytest.approx(measured, rel=0.05)


def test_layers_that_calibration_does_not_reach_have_no_score(scored):
    adaptor, model, space, _ = scored
    assert list(measure_layer_noise(adaptor, model, [], space)) == ["embed"]


def test_an_adaptor_without_inputs_of_layers_is_named(scored):
    _, model, space, _ = scored
    adaptor = OnnxRuntimeAdaptor()
    adaptor.layer_inputs = None
    with pytest.raises(ConversionError, match="offers no inputs of layers"):
        measure_layer_noise(adaptor, model, [], space)
