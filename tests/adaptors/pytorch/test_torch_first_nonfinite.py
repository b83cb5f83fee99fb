"""What is said of the first number that is not finite in a torch module is true."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.core.plan import PrecisionPlan
from neural_mp.training import apply_plan, autocast, first_nonfinite

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
BATCH = INPUTS, torch.arange(16) % 4


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(4, 4))


@pytest.mark.parametrize(
    "plan", [{"0": "fp32", "1": "fp16"}, {"": "fp32", "1": "fp16"}, {"0": "fp32", "2": "fp16"}]
)
def test_a_module_that_cannot_hold_its_inputs_is_said_to(plan):
    model = net()
    with torch.no_grad():
        model[0].weight.mul_(1e6)
    cause = first_nonfinite(apply_plan(model, PrecisionPlan.from_dict(plan)), BATCH)
    assert cause.message.startswith("'1' (Linear) reads values of up to ")
    assert cause.message.endswith("which overflow float16")
    assert (cause.layer, cause.keep) == ("1", True)


def test_a_loss_scale_too_large_for_the_outputs_is_said_to():
    model = net()
    with autocast("fp16"):
        assert first_nonfinite(model, BATCH, F.cross_entropy, loss_scale=2.0**10) is None
        cause = first_nonfinite(model, BATCH, F.cross_entropy, loss_scale=2.0**24)
    assert cause.layer is None
    assert cause.message.startswith("backwards, the gradients of the outputs of '2'")
    assert "lower the loss scale" in cause.message


def test_code_between_the_layers_is_said_to_make_inf():
    class Divides(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

        def forward(self, x):
            return self.fc2(self.fc1(x).abs() / 0)

    cause = first_nonfinite(Divides(), BATCH, F.cross_entropy)
    assert cause.layer is None
    assert (
        "code outside of the layers, before 'fc2' (Linear), turns values of at most"
        in cause.message
    )
    assert cause.message.endswith("into Inf")
