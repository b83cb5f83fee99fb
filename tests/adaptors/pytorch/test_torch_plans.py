"""A plan on a torch module: what runs in what, and what becomes of the module otherwise."""

import copy
import inspect

import pytest
import torch
from torch import nn

from neural_mp.core.plan import PrecisionPlan
from neural_mp.training import apply_plan

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


def net(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), *between, nn.Linear(8, 4))


class Interrupted(nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


def test_autocast_ends_where_the_user_interrupts_the_model():
    model = apply_plan(net(Interrupted()), PrecisionPlan.from_dict({"0": "bf16", "2": "fp32"}))
    nesting = torch.autocast_increment_nesting()
    with pytest.raises(KeyboardInterrupt):
        model(INPUTS)
    left = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting(), torch.autocast_decrement_nesting()
    assert left == nesting
    assert not torch.is_autocast_enabled("cpu")


def test_a_planned_model_can_be_compiled_whole():
    model = apply_plan(net(), PrecisionPlan.from_dict({"0": "bf16", "2": "fp32"}))
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(INPUTS), model(INPUTS), rtol=0, atol=0)


def test_a_replica_for_another_device_runs_with_its_own_weights():
    model = apply_plan(net(), PrecisionPlan.from_dict({"0": "bf16", "2": "fp32"}))
    for module in (model[2], copy.deepcopy(model[2])):
        replica = module._replicate_for_data_parallel()
        replica.weight, replica.bias = torch.zeros(4, 8), torch.zeros(4)
        assert not replica(INPUTS).any()
        assert module(INPUTS).any()


def test_a_planned_model_still_says_what_it_takes():
    model = apply_plan(nn.Linear(8, 4), PrecisionPlan.from_dict({"": "bf16"}))
    assert list(inspect.signature(model.forward).parameters) == ["input"]
    exported = torch.export.export(model, (INPUTS,)).module()
    torch.testing.assert_close(exported(INPUTS), model(INPUTS), rtol=0, atol=0)


def test_an_empty_plan_takes_away_what_an_earlier_one_put_on_the_modules_within():
    model = net()
    attributes = [sorted(vars(module)) for module in model.modules()]
    wanted = model(INPUTS)
    apply_plan(model, PrecisionPlan.from_dict({"0": "fp32", "2": "bf16"}))
    apply_plan(model, PrecisionPlan.from_dict({}))
    torch.testing.assert_close(model(INPUTS), wanted, rtol=0, atol=0)
    assert [sorted(vars(module)) for module in model] == attributes[1:]
