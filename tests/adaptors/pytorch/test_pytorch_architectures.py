"""Any plan over ten architectures: it converts and runs near FP32, or says why it cannot."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build
from hypothesis import given, settings
from hypothesis import strategies as st
from machine import machine
from torch.utils import _pytree as pytree

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import CaptureError
from neural_mp.profiling.audit import Verdict, audit_model, audit_ops
from neural_mp.space import TuningSpace, list_effective_ops
from neural_mp.testing import signal_to_noise

pytestmark = pytest.mark.slow

MACHINE = machine(Precision.BF16, Precision.FP16)
#: Decibels that every output keeps under every plan.
BOUND = 20
#: The same with weights in 4 bits, each of which alone has about 20 dB.
BOUND_OF_4_BITS = 15


@dataclass(frozen=True)
class Case:
    adaptor: PyTorchAdaptor
    model: Any
    space: TuningSpace
    observed: Observations
    inputs: Any
    reference: list[torch.Tensor]


def floats(result: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves(result)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


@cache
def case(name: str) -> Case:
    architecture, module = ARCHITECTURES[name], build(name)
    inputs, adaptor = architecture.inputs(4), PyTorchAdaptor()
    with torch.no_grad():
        result = module(**inputs) if isinstance(inputs, dict) else module(inputs)
    capture = "whole" if architecture.capturable else "modules"
    model = adaptor.load(module, example=inputs, capture=capture)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs], space)
    return Case(adaptor, model, space, observed, inputs, floats(result))


def _near_fp32(space, op):
    """The forms of an op, without 2 and 3 bits and weights rounded with calibration data."""
    return [
        config
        for config in space.capabilities[op].configs
        if config.precision.bits >= 4 and not config.needs_data
    ]


@pytest.mark.parametrize("name", ARCHITECTURES)
@settings(max_examples=3)
@given(st.data())
def test_any_plan_runs_near_fp32(name, data):
    loaded = case(name)
    plan = PrecisionPlan(
        {
            op: data.draw(st.sampled_from(_near_fp32(loaded.space, op)), label=op)
            for op in loaded.space.tunable_ops
        }
    )
    converted = loaded.adaptor.convert(
        loaded.model, loaded.space.resolve(plan), loaded.observed, loaded.space
    )
    result = loaded.adaptor.predict(converted, loaded.inputs)
    bound = BOUND_OF_4_BITS if Precision.INT4 in plan.counts() else BOUND
    for reference, got in zip(loaded.reference, floats(result), strict=True):
        assert got.dtype == reference.dtype
        assert signal_to_noise(reference.numpy(), got.numpy()) > bound
    single = floats(loaded.adaptor.predict(converted, ARCHITECTURES[name].inputs(1)))
    assert len(single) == len(loaded.reference)

    planned = list_effective_ops(loaded.space, loaded.space.resolve(plan))
    audit = audit_model(LoadedModel(loaded.adaptor, converted), planned)
    assert audit.holds, audit.findings
    assert not [op for op in audit.findings if op.verdict is Verdict.LOWER]


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if a.capturable])
def test_the_whole_graph_is_captured_with_free_axes(name):
    loaded = case(name)
    assert not [w for w in loaded.model.warnings if "fixes" in w]
    three = floats(loaded.adaptor.predict(loaded.model, ARCHITECTURES[name].inputs(3)))
    with torch.no_grad():
        inputs, module = ARCHITECTURES[name].inputs(3), loaded.model.original
        expected = floats(module(**inputs) if isinstance(inputs, dict) else module(inputs))
    for got, reference in zip(three, expected, strict=True):
        torch.testing.assert_close(got, reference, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "lstm_tagger"])
def test_other_sequence_lengths_run(name):
    loaded = case(name)
    plan = PrecisionPlan(
        {
            op: loaded.space.capabilities[op].config(Precision.INT8)
            or loaded.space.capabilities[op].configs[-1]
            for op in loaded.space.tunable_ops
        }
    )
    converted = loaded.adaptor.convert(
        loaded.model, loaded.space.resolve(plan), loaded.observed, loaded.space
    )
    longer = pytree.tree_map(lambda leaf: torch.cat([leaf, leaf[:, :3]], 1), loaded.inputs)
    result = floats(loaded.adaptor.predict(converted, longer))
    with torch.no_grad():
        module = loaded.model.original
        expected = floats(module(**longer) if isinstance(longer, dict) else module(longer))
    for got, reference in zip(result, expected, strict=True):
        assert got.shape == reference.shape
        assert signal_to_noise(reference.numpy(), got.numpy()) > BOUND


def test_a_model_that_branches_on_values_is_refused_with_a_way_on():
    module = build("early_exit")
    with pytest.raises(CaptureError) as raised:
        PyTorchAdaptor().load(module, example=ARCHITECTURES["early_exit"].inputs(4))
    message = str(raised.value)
    assert "EarlyExit" in message
    assert "architectures.py" in message  # where
    assert "torch.where" in message
    assert "capture = 'modules'" in message


def test_module_by_module_the_users_code_still_decides():
    """The early exit is taken where the first layers are sure, by the converted model too."""
    loaded = case("early_exit")
    plan = PrecisionPlan(
        {
            op: loaded.space.capabilities[op].config(Precision.INT8) or config.configs[-1]
            for op, config in loaded.space.capabilities.items()
            if op in loaded.space.tunable_ops
        }
    )
    user, sure = loaded.model.original, loaded.inputs * 200
    observed = loaded.adaptor.observe(loaded.model, [loaded.inputs, sure], loaded.space)
    converted = loaded.adaptor.convert(
        loaded.model, loaded.space.resolve(plan), observed, loaded.space
    )
    with torch.no_grad():
        assert user.early(user.stem(sure).mean((2, 3))).softmax(1).max() > 0.9
        expected = user(sure)
    got = loaded.adaptor.predict(converted, sure)
    assert signal_to_noise(expected.numpy(), got.numpy()) > BOUND
    assert list(converted.parts) == ["stem", "early", "late", "rest"]
    ran = loaded.adaptor.trace_kernels(converted, sure)
    reached = {op for op, report in ran.items() if report.was_executed}
    assert reached == {"stem.0", "early"}
    report = audit_ops(
        list_effective_ops(loaded.space, loaded.space.resolve(plan)), ran, lambda _: False
    )
    assert report.holds
    assert {op.name for op in report.findings} == {"late", "rest.0"}
    assert type(user.early) is torch.nn.Linear  # the user's own model is untouched
