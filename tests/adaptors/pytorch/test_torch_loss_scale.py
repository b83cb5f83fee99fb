"""Loss scaling in torch goes by the rule, and keeps weights that torch's own scaler ruins."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from neural_mp.core.training_numerics import LossScale, LossScaleState
from neural_mp.errors import ConfigurationError
from neural_mp.training import GradScaler

RULE = LossScale(growth_interval=3)


class Training:
    """A line fitted by gradient descent, of which every batch may be spoiled."""

    def __init__(self, scaler, rate=0.1):
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(4))
        self.optimizer = torch.optim.SGD([self.weight], rate)
        self.scaler = scaler
        self.inputs = torch.randn(16, 4)
        self.targets = self.inputs @ torch.tensor([1.0, -2.0, 0.5, 3.0])

    def step(self, finite=True):
        self.optimizer.zero_grad()
        inputs = self.inputs if finite else self.inputs * torch.inf
        loss = (inputs @ self.weight - self.targets).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    @property
    def is_sound(self):
        return bool(self.weight.isfinite().all())


@settings(deadline=None, max_examples=50)
@given(st.lists(st.booleans(), min_size=1, max_size=30))
def test_its_state_is_that_of_the_rule_step_by_step(sequence):
    training, state = Training(GradScaler("cpu", RULE)), RULE.start()
    for finite in sequence:
        previous = training.weight.detach().clone()
        training.step(finite)
        state = RULE.after(state, finite)
        assert training.scaler.state == state
        assert training.scaler.loss_scale == state.scale
        assert torch.equal(previous, training.weight) != finite


def test_three_hundred_bad_batches_and_a_good_one():
    ours, stock = Training(GradScaler("cpu")), Training(torch.amp.GradScaler("cpu"))
    for training in (ours, stock):
        for _ in range(300):
            training.step(finite=False)
        assert training.is_sound
        training.step()
    assert ours.is_sound
    assert not stock.is_sound
    assert ours.scaler.state == LossScaleState(2.0**-14, 1, 1, 300, 0)


def test_weights_are_those_of_plain_float32_where_nothing_overflows():
    training = Training(GradScaler("cpu", RULE))
    inputs, targets = training.inputs.numpy(), training.targets.numpy()
    weight = training.weight.detach().numpy().copy()
    for _ in range(10):
        training.step()
        error = inputs @ weight - targets
        weight = weight - np.float32(0.1) * (inputs.T @ (np.float32(2 / 16) * error))
    np.testing.assert_allclose(training.weight.detach().numpy(), weight, rtol=1e-5, atol=1e-6)


def test_a_fixed_scale_skips_and_stays():
    training = Training(GradScaler("cpu", 512))
    for finite in (True, False, False):
        training.step(finite)
    assert (training.scaler.loss_scale, training.scaler.skipped_in_a_row) == (512, 2)


def test_it_goes_on_where_a_checkpoint_stopped():
    sequence = (True, False, True, True, True, False, True)
    whole, first = Training(GradScaler("cpu", RULE)), Training(GradScaler("cpu", RULE))
    for finite in sequence:
        whole.step(finite)
    for finite in sequence[:4]:
        first.step(finite)
    second = Training(GradScaler("cpu", RULE))
    second.scaler.load_state_dict(first.scaler.state_dict())
    second.weight = first.weight
    second.optimizer = first.optimizer
    for finite in sequence[4:]:
        second.step(finite)
    assert second.scaler.state == whole.scaler.state
    assert torch.equal(second.weight, whole.weight)


def test_a_checkpoint_of_torchs_own_scaler_is_taken_within_bounds():
    stock = Training(torch.amp.GradScaler("cpu"))
    for _ in range(300):
        stock.step(finite=False)
    scaler = GradScaler("cpu")
    scaler.load_state_dict(stock.scaler.state_dict())
    assert scaler.loss_scale == scaler.rule.minimum
    torch.amp.GradScaler("cpu").load_state_dict(scaler.state_dict())


def test_gradients_may_be_unscaled_to_be_clipped():
    training = Training(GradScaler("cpu", RULE), rate=1.0)
    loss = (training.inputs @ training.weight - training.targets).square().mean()
    training.scaler.scale(loss).backward()
    training.scaler.unscale_(training.optimizer)
    torch.nn.utils.clip_grad_norm_([training.weight], 0.5)
    previous = training.weight.detach().clone()
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert float((training.weight.detach() - previous).norm()) == pytest.approx(0.5, rel=1e-4)


def test_disabled_it_does_nothing():
    training = Training(GradScaler("cpu", enabled=False))
    training.step()
    assert training.scaler.loss_scale == 1
    assert training.scaler.state_dict() == {}


def test_a_scale_can_be_set():
    training = Training(GradScaler("cpu"))
    training.step()
    training.scaler.update(64.0)
    assert training.scaler.loss_scale == 64
    training.step()
    assert training.scaler.state.scale == 64


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_scale": "dyn"}, "'dynamic', a number or a LossScale"),
        ({"device": "gpu0"}, "device must be a torch device"),
    ],
)
def test_bad_options_are_named(options, said):
    with pytest.raises(ConfigurationError, match=said):
        GradScaler(**options)


def test_an_update_without_a_step_says_so():
    scaler = GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ConfigurationError, match="must follow a step"):
        scaler.update()


@pytest.mark.parametrize("scale", [0, -1.0, float("nan"), float("inf"), "high"])
def test_a_new_scale_that_would_ruin_weights_is_refused(scale):
    training = Training(GradScaler("cpu"))
    training.step()
    previous = training.scaler.loss_scale
    with pytest.raises(ConfigurationError, match="new_scale must be a finite number above 0"):
        training.scaler.update(scale)
    assert training.scaler.loss_scale == previous
