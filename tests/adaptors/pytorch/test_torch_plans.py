"""A plan on a torch module: what runs in what, and what becomes of the module otherwise."""

import copy
import inspect
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError
from neural_mp.training import advise, apply_plan

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
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting(), torch.autocast_decrement_nesting()
    assert depth == nesting
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
    exported = torch.export.export(model, (INPUTS,), strict=False).module()
    torch.testing.assert_close(exported(INPUTS), model(INPUTS), rtol=0, atol=0)


def test_an_empty_plan_takes_away_what_an_earlier_one_put_on_the_modules_within():
    model = net()
    attributes = [sorted(vars(module)) for module in model.modules()]
    expected = model(INPUTS)
    apply_plan(model, PrecisionPlan.from_dict({"0": "fp32", "2": "bf16"}))
    apply_plan(model, PrecisionPlan.from_dict({}))
    torch.testing.assert_close(model(INPUTS), expected, rtol=0, atol=0)
    assert [sorted(vars(module)) for module in model] == attributes[1:]


def dtypes_seen(model):
    """Name → what a module of the model computes in: that of its product, if it is linear."""
    dtypes = {}

    def noting(name):
        def note(module, args, kwargs, outputs):
            rounded = torch.equal(outputs, outputs.bfloat16().float().to(outputs.dtype))
            dtypes[name] = "bf16" if rounded else "fp32"

        return note

    hooks = [
        module.register_forward_hook(noting(name), with_kwargs=True)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    outputs = model(INPUTS)
    outputs.sum().backward()
    for hook in hooks:
        hook.remove()
    assert outputs.dtype == torch.float32
    return dtypes


def nested():
    inner = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(8, 8), inner, nn.Linear(8, 8))


@pytest.mark.parametrize(
    ("plan", "low"),
    [
        ({"1": "fp32", "1.1": "bf16"}, ["0", "1.1.0", "2"]),
        ({"1": "fp32", "1.0": "bf16", "2": "bf16"}, ["0", "1.0", "2"]),
        ({"1": "bf16", "1.1": "fp32", "2": "fp32"}, ["0", "1.0", "1.2"]),
        ({"": "fp32", "1": "bf16"}, ["1.0", "1.1.0", "1.2"]),
        ({"": "fp32", "1": "bf16", "1.0": "fp32"}, ["1.1.0", "1.2"]),
        ({"": "bf16", "1": "fp32", "1.1.0": "bf16"}, ["0", "1.1.0", "2"]),
        ({"": "fp32"}, []),
    ],
)
def test_the_nearest_entry_counts_also_that_of_the_model_itself(plan, low):
    model = apply_plan(nested(), PrecisionPlan.from_dict(plan))
    assert [name for name, dtype in dtypes_seen(model).items() if dtype == "bf16"] == low


def test_a_module_in_two_places_may_be_named_by_either():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), nn.Linear(8, 8))
    for name in ("0.0", "1.0"):
        apply_plan(model, PrecisionPlan.from_dict({name: "fp32", "2": "bf16"}))
        assert dtypes_seen(model) == {"0.0": "fp32", "2": "bf16"}
    with pytest.raises(
        ConfigurationError, match=r"'0.0' and '1.0', which are the same module, got fp32 and bf16"
    ):
        apply_plan(model, PrecisionPlan.from_dict({"0.0": "fp32", "1.0": "bf16"}))


@dataclass(frozen=True)
class Found:
    scores: torch.Tensor
    hidden: list[torch.Tensor]
    label: str = "both"


class GivesRecord(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.scores = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        hidden = self.fc(x)
        return Found(self.scores(hidden), [hidden])


def test_outputs_in_a_dataclass_are_float32_and_found_to_be_outputs():
    labels = torch.arange(16) % 4
    advice = advise(
        GivesRecord(), [(INPUTS, labels)], lambda out, y: F.cross_entropy(out.scores, y), steps=1
    )
    assert set(advice.keep) == {"fc", "scores"}
    model = apply_plan(GivesRecord(), PrecisionPlan.from_dict({"fc": "bf16", "scores": "bf16"}))
    outputs = model(INPUTS)
    assert outputs.scores.dtype == outputs.hidden[0].dtype == torch.float32
    assert outputs.label == "both"
    assert torch.equal(outputs.scores, outputs.scores.bfloat16().float())


def test_a_plan_that_advice_gives_fits_the_model():
    shared = nn.Linear(8, 8)
    shares = nn.Sequential(
        nn.Sequential(shared, nn.ReLU()), nn.Sequential(shared, nn.Tanh()), nn.Linear(8, 4)
    )
    normed = nn.Sequential(
        weight_norm(nn.Linear(8, 8)), spectral_norm(nn.Linear(8, 8)), nn.Linear(8, 4)
    )
    labels = torch.arange(16) % 4
    for model, units in ((shares, ["0.0", "0.1", "1.1", "2"]), (normed, ["0", "1", "2"])):
        advice = advise(model, [(INPUTS, labels)], F.cross_entropy, steps=1, limit=1e-9)
        assert list(advice.layers) == units
        inner = [layer for layer in advice.layers.values() if layer.kind.endswith("Linear")][:-1]
        assert inner
        assert all(layer.noise > 0 for layer in inner)
        F.cross_entropy(apply_plan(model, advice)(INPUTS), labels).backward()
