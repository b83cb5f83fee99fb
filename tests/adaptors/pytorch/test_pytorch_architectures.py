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
from neural_mp.profiling.audit import Verdict, audit_ops, audited
from neural_mp.space import TuningSpace, planned_ops
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
    known = case(name)
    plan = PrecisionPlan(
        {
            op: data.draw(st.sampled_from(_near_fp32(known.space, op)), label=op)
            for op in known.space.tunable_ops
        }
    )
    converted = known.adaptor.convert(
        known.model, known.space.resolve(plan), known.observed, known.space
    )
    result = known.adaptor.predict(converted, known.inputs)
    bound = BOUND_OF_4_BITS if Precision.INT4 in plan.counts() else BOUND
    for wanted, got in zip(known.reference, floats(result), strict=True):
        assert got.dtype == wanted.dtype
        assert signal_to_noise(wanted.numpy(), got.numpy()) > bound
    single = floats(known.adaptor.predict(converted, ARCHITECTURES[name].inputs(1)))
    assert len(single) == len(known.reference)

    planned = planned_ops(known.space, known.space.resolve(plan))
    found = audited(LoadedModel(known.adaptor, converted), planned)
    assert found.holds, found.findings
    assert not [op for op in found.findings if op.verdict is Verdict.LOWER]


@pytest.mark.parametrize("name", [n for n, a in ARCHITECTURES.items() if a.capturable])
def test_the_whole_graph_is_captured_with_free_axes(name):
    known = case(name)
    assert not [w for w in known.model.warnings if "fixes" in w]
    three = floats(known.adaptor.predict(known.model, ARCHITECTURES[name].inputs(3)))
    with torch.no_grad():
        inputs, module = ARCHITECTURES[name].inputs(3), known.model.original
        expected = floats(module(**inputs) if isinstance(inputs, dict) else module(inputs))
    for got, wanted in zip(three, expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "lstm_tagger"])
def test_other_sequence_lengths_run(name):
    known = case(name)
    plan = PrecisionPlan(
        {
            op: known.space.capabilities[op].config(Precision.INT8)
            or known.space.capabilities[op].configs[-1]
            for op in known.space.tunable_ops
        }
    )
    converted = known.adaptor.convert(
        known.model, known.space.resolve(plan), known.observed, known.space
    )
    longer = pytree.tree_map(lambda leaf: torch.cat([leaf, leaf[:, :3]], 1), known.inputs)
    result = floats(known.adaptor.predict(converted, longer))
    with torch.no_grad():
        module = known.model.original
        expected = floats(module(**longer) if isinstance(longer, dict) else module(longer))
    for got, wanted in zip(result, expected, strict=True):
        assert got.shape == wanted.shape
        assert signal_to_noise(wanted.numpy(), got.numpy()) > BOUND


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
    known = case("early_exit")
    plan = PrecisionPlan(
        {
            op: known.space.capabilities[op].config(Precision.INT8) or config.configs[-1]
            for op, config in known.space.capabilities.items()
            if op in known.space.tunable_ops
        }
    )
    user, sure = known.model.original, known.inputs * 200
    observed = known.adaptor.observe(known.model, [known.inputs, sure], known.space)
    converted = known.adaptor.convert(known.model, known.space.resolve(plan), observed, known.space)
    with torch.no_grad():
        assert user.early(user.stem(sure).mean((2, 3))).softmax(1).max() > 0.9
        expected = user(sure)
    got = known.adaptor.predict(converted, sure)
    assert signal_to_noise(expected.numpy(), got.numpy()) > BOUND
    assert list(converted.parts) == ["stem", "early", "late", "rest"]
    ran = known.adaptor.kernel_trace.trace(converted, sure)
    reached = {op for op, found in ran.items() if found.executed}
    assert reached == {"stem.0", "early"}
    found = audit_ops(planned_ops(known.space, known.space.resolve(plan)), ran, lambda _: False)
    assert found.holds
    assert {op.name for op in found.findings} == {"late", "rest.0"}
    assert type(user.early) is torch.nn.Linear  # the user's own model is untouched
