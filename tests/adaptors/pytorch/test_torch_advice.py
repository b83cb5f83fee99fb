"""Advice on a torch module: the modules that 16 bits break are found, and no others."""

import copy
import math
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch_dangers import batches, digits_net

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError, DataError, TrainingError, UnknownOperatorError
from neural_mp.testing import TrainingContract
from neural_mp.training import GradScaler, advise, apply_plan, first_nonfinite


@pytest.fixture(scope="module")
def data(digits):
    return batches(digits[0])


def last_loss(model, data, precision):
    """The mean loss of the third epoch."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = GradScaler("cpu", enabled=precision == "fp16")
    for _ in range(3):
        total = 0.0
        for inputs, targets in data:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += float(loss.detach())
    return total / len(data)


class TestTorchTraining(TrainingContract):
    framework = "pytorch"
    overflowing = "energy"
    loss = staticmethod(F.cross_entropy)

    @pytest.fixture
    def model(self):
        return digits_net(dangerous=True)

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls, digits):
        return batches(digits[0])[0]


def everything_in(precision):
    return PrecisionPlan.from_dict(
        dict.fromkeys(dict(digits_net(True).named_children()), precision)
    )


@pytest.mark.slow
def test_both_dangers_are_found_in_fp16_one_of_them_late(data):
    at_first = advise(digits_net(True), data, F.cross_entropy, "fp16", steps=0)
    assert set(at_first.keep) == {"energy", "logits"}
    advice = advise(digits_net(True), data, F.cross_entropy, "fp16")
    assert set(advice.keep) == {"energy", "offset", "logits"}
    assert "turns float16 inputs of at most 0.4" in advice.layers["energy"].reason
    assert advice.layers["offset"].step > 0
    expected = last_loss(digits_net(True), data, "fp32")
    all_low = apply_plan(digits_net(True), everything_in("fp16"))
    assert math.isnan(last_loss(all_low, data, "fp16"))
    advised = last_loss(apply_plan(digits_net(True), advice), data, "fp16")
    assert 0.8 * expected < advised < 1.05 * expected  # chance may make it a little better, too


@pytest.mark.slow
def test_bf16_has_the_range_but_not_the_digits(data):
    advice = advise(digits_net(True), data, F.cross_entropy, "bf16")
    assert {"offset", "logits"} <= set(advice.keep)
    assert "energy" not in advice.keep
    expected = last_loss(digits_net(True), data, "fp32")
    lost = last_loss(apply_plan(digits_net(True), everything_in("bf16")), data, "bf16")
    advised = last_loss(apply_plan(digits_net(True), advice), data, "bf16")
    assert 0.8 * expected < advised < 1.05 * expected  # chance may make it a little better, too
    assert lost > 2 * expected


def test_where_all_layers_add_a_little_it_says_which_limit_keeps_what_breaks(data):
    strict = advise(digits_net(False), data, F.cross_entropy, "bf16", steps=0, limit=1e-9)
    assert len(strict.keep) > 3
    (message,) = [warning for warning in strict.warnings if "many layers are kept" in warning]
    limit = float(message.split("limit=")[1].split(",")[0])
    wide = advise(digits_net(False), data, F.cross_entropy, "bf16", steps=0, limit=limit)
    assert wide.keep == ("logits",)
    assert not any("many layers" in warning for warning in wide.warnings)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_healthy_net_keeps_its_outputs_only_and_costs_little(data, precision):
    advice = advise(digits_net(False), data, F.cross_entropy, precision, steps=20)
    assert advice.keep == ("logits",)
    assert advice.passes == 20 + 2 * 11


def test_the_module_is_left_as_it_was(data):
    model = digits_net(True).eval()
    model[0].weight.grad = torch.ones_like(model[0].weight)
    original = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    advise(model, data, F.cross_entropy, "fp16", steps=4)
    assert all(torch.equal(value, original[name]) for name, value in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert torch.equal(model[0].weight.grad, torch.ones_like(model[0].weight))
    assert not any(module._forward_hooks for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


class DropsTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(64, 64), nn.Dropout(0.5), nn.Linear(64, 10)

    def forward(self, x):
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc2(F.dropout(self.drop(x), 0.5, self.training))


def test_what_dropout_drops_is_no_noise(data):
    torch.manual_seed(0)
    model = DropsTwice()
    assert advise(model, data, F.cross_entropy, "bf16", steps=5).keep == ("fc2",)
    assert model.drop.p == 0.5


class OwnProduct(nn.Module):
    """Multiplies by a weight in its own code, where torch takes one type of numbers only."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 32), nn.Linear(16, 10)
        self.weight = nn.Parameter(torch.randn(32, 16) / 6)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x.flatten(1)) @ self.weight))


def test_a_model_whose_own_code_multiplies_can_be_advised_on(data):
    torch.manual_seed(0)
    advice = advise(OwnProduct(), data, F.cross_entropy, "bf16", steps=3, limit=1e-9)
    assert set(advice.layers) == {"fc1", "fc2"}


def test_what_breaks_in_float32_is_said_to(data):
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x - 1000.0)

    model = nn.Sequential(nn.Flatten(), Root(), nn.Linear(64, 10))
    with pytest.raises(TrainingError, match=r"be finite in float32.*'1' \(Root\) turns float32"):
        advise(model, data, F.cross_entropy)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"loss": None}, ConfigurationError, "loss must be the loss of the training"),
        ({"loss": "mse"}, ConfigurationError, "loss must be a function of outputs and targets"),
        (
            {"loss": lambda out, y: F.cross_entropy(out, y, reduction="none")},
            ConfigurationError,
            r"must return a tensor with one number, got \(64,\); take its mean",
        ),
        ({"loss": lambda out, y: torch.zeros(())}, ConfigurationError, "but depends on none"),
        ({"optimizer": "adam"}, ConfigurationError, "optimizer must be a function from"),
        (
            {"batches": [(torch.zeros(3, 5), torch.zeros(3))]},
            DataError,
            "does not accept the inputs",
        ),
        ({"batches": [torch.zeros(3, 1, 8, 8)]}, DataError, "without targets"),
    ],
)
def test_bad_input_is_one_error_that_names_it(data, change, error, said):
    arguments = {"model": digits_net(False), "batches": data, "loss": F.cross_entropy, "steps": 2}
    with pytest.raises(error, match=said):
        advise(**(arguments | change))


def dtypes_seen(model, batch):
    dtypes = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _a, out, name=name: dtypes.update({name: out.dtype})
        )
        for name, module in model.named_modules()
        if name
    ]
    outputs = model(batch)
    for hook in hooks:
        hook.remove()
    return dtypes, outputs.dtype


def test_a_plan_runs_modules_as_it_says(data):
    model = digits_net(False)
    plan = PrecisionPlan.from_dict({**everything_in("bf16").to_dict(), "fc1": "fp32"})
    assert apply_plan(model, plan) is model
    dtypes, outputs = dtypes_seen(model, data[0][0])
    assert dtypes["conv1"] == dtypes["conv2"] == dtypes["logits"] == torch.bfloat16
    assert dtypes["fc1"] == dtypes["relu3"] == torch.float32
    assert outputs == torch.float32
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_a_plan_replaces_the_one_before(data):
    model = apply_plan(digits_net(False), everything_in("bf16"))
    apply_plan(model, PrecisionPlan.from_dict({"conv1": "fp32"}))
    dtypes, _ = dtypes_seen(model, data[0][0])
    assert set(dtypes.values()) == {torch.float32}


def test_a_planned_model_can_be_copied_and_pickled(data):
    model = apply_plan(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), everything_plain())
    expected = model(data[0][0])
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(again(data[0][0]), expected, rtol=0, atol=0)
        dtypes, _ = dtypes_seen(again, data[0][0])
        assert dtypes["1"] == torch.bfloat16


def everything_plain():
    return PrecisionPlan.from_dict({"1": "bf16"})


def test_autocast_ends_where_the_model_fails(data):
    model = apply_plan(digits_net(False), everything_in("bf16"))
    with pytest.raises(RuntimeError):
        model(torch.zeros(2, 3))
    assert not torch.is_autocast_enabled("cpu")


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(UnknownOperatorError, match="'conv', .*did you mean 'conv"):
        apply_plan(digits_net(False), PrecisionPlan.from_dict({"conv": "bf16"}))


def test_the_module_that_makes_inf_is_named(data):
    model = digits_net(True)
    assert first_nonfinite(model, data[0], F.cross_entropy) is None
    with torch.autocast("cpu", torch.float16):
        cause = first_nonfinite(model, data[0], F.cross_entropy)
    assert cause.layer == "energy"
    assert "turns float16 inputs of at most 0.4" in cause.message
    with torch.autocast("cpu", torch.float16):
        assert first_nonfinite(model, data[0][0]).layer == "energy"


def test_the_module_that_ruins_gradients_is_named(data):
    class Root(nn.Module):
        def forward(self, x):
            return x + torch.sqrt((x - x).sum(-1, keepdim=True))

    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Root())
    cause = first_nonfinite(model, data[0], F.cross_entropy)
    assert cause.layer == "2"
    assert cause.message.startswith("backwards, '2' (Root) turns float32 gradients")
    assert first_nonfinite(model, data[0][0]) is None
