"""Decoders whose key-value cache is a state: converted, saved, and decoded step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_decoders as decoders
import pytest
from ov_nets import read

import neural_mp
from neural_mp import convert_with_plan
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.runtime import make_core
from neural_mp.core.hardware import detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision

IDS = np.random.default_rng(0).integers(0, decoders.WORDS, (1, 6))
FEEDS = {"input_ids": IDS, "attention_mask": np.ones_like(IDS)}


def _stateful() -> Any:
    transformations = pytest.importorskip("openvino._offline_transformations")
    model = read(decoders.optimum())
    sizes = {"input_ids": [1, -1], "attention_mask": [1, -1]}
    cached = [1, decoders.PAIRS, -1, decoders.HEAD]
    model.reshape({port: sizes.get(port.any_name, cached) for port in model.inputs})
    names = [f"{i}.{kind}" for i in range(decoders.LAYERS) for kind in ("key", "value")]
    transformations.apply_make_stateful_transformation(
        model, {f"past_key_values.{name}": f"present.{name}" for name in names}
    )
    return model


@pytest.fixture(scope="module")
def net():
    return _stateful()


@pytest.fixture(scope="module")
def converted(net, low_bit_kernels):
    adaptor = OpenVinoAdaptor()
    space = adaptor.space(adaptor.load(net, example=FEEDS), detect()).without_data()
    choices = {op: space.choice(op, Precision.INT4) for op in space.tunable_ops}
    plan = PrecisionPlan({op: config for op, config in choices.items() if config is not None})
    assert len(plan) == 7 * decoders.LAYERS + 2
    return convert_with_plan(net, plan, inputs=FEEDS)


@pytest.mark.slow
def test_every_call_begins_with_an_empty_state(net, converted):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(net, example=FEEDS)
    first, second = (np.asarray(adaptor.predict(model, FEEDS)) for _ in range(2))
    assert np.array_equal(first, second)
    assert np.array_equal(converted(FEEDS), converted(FEEDS))


def test_the_cache_stays_a_state_and_kernels_are_those_of_the_plan(converted, tmp_path):
    states = 2 * decoders.LAYERS
    assert len(converted.model.get_sinks()) == states
    assert converted.audit().holds
    converted.save(tmp_path)
    again = neural_mp.load(tmp_path)
    assert len(again.model.get_sinks()) == states
    assert np.array_equal(again(FEEDS), converted(FEEDS))


def test_steps_with_the_state_equal_one_pass(converted):
    compiled = make_core().compile_model(
        converted.model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}
    )
    request = compiled.create_infer_request()
    for count in (4, 6):
        feeds = {"input_ids": IDS[:, count - 2 if count > 4 else 0 : count],
                 "attention_mask": np.ones((1, count), np.int64)}  # fmt: skip
        last = request.infer(feeds)[0].copy()
    np.testing.assert_allclose(last, converted(FEEDS)[:, 4:], atol=1e-4)
