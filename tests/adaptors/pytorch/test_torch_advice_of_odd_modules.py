"""Advice on torch modules that do more than multiply: it is right, or says what is wrong."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import ConfigurationError
from neural_mp.training import advise, apply_plan, autocast, first_nonfinite

INPUTS = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(16) % 4
DATA = [(INPUTS, LABELS)]


def net(*between, first=None):
    torch.manual_seed(0)
    return nn.Sequential(first or nn.Linear(8, 8), nn.ReLU(), *between, nn.Linear(8, 4))


def trained_once(model, advice, data=DATA):
    """The model after the plan was put on and gradients were taken."""
    F.cross_entropy(apply_plan(model, advice)(data[0][0]), data[0][1]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    return model


class OwnCode(nn.Module):
    """Units around some code of the model's own."""

    def __init__(self, code):
        super().__init__()
        torch.manual_seed(0)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.code = code

    def forward(self, x):
        return self.fc3(self.code(self.fc2(self.fc1(x)), self.weight))


def test_what_feeds_code_that_takes_no_16_bits_is_kept():
    model = OwnCode(lambda x, w: x + torch.addmv(x[:, 0], x, w[0])[:, None])
    advice = advise(model, DATA, F.cross_entropy, steps=2)
    assert advice.keep == ("fc2", "fc3")
    assert "in bf16, the model does not accept" in advice.layers["fc2"].reason
    assert "RuntimeError" in advice.layers["fc2"].reason  # torch's own words follow
    trained_once(model, advice)


def test_where_the_models_own_code_overflows_nothing_is_left_in_16_bits():
    model = OwnCode(lambda x, w: x + 1e-5 * ((INPUTS * 300) @ (w * 300)))
    advice = advise(model, DATA, F.cross_entropy, "fp16", steps=2)
    assert advice.keep == ("fc1", "fc2", "fc3")
    trained_once(model, advice)


class WantsFloat32(nn.Module):
    def forward(self, x):
        assert x.dtype == torch.float32
        return x.clone()


def test_a_module_that_refuses_16_bits_is_kept():
    model = net(WantsFloat32())
    advice = advise(model, DATA, F.cross_entropy, steps=1)
    assert "2" in advice.keep
    trained_once(model, advice)


def test_sparse_and_complex_gradients_count():
    class Phases(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.fc = nn.Embedding(20, 8, sparse=True), nn.Linear(8, 4)
            self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64) * (1 + 2j))

        def forward(self, tokens):
            return (self.fc(self.words(tokens).mean(1)) * self.turn).imag

    torch.manual_seed(0)
    data = [(torch.arange(80).reshape(16, 5) % 20, LABELS)]
    advice = advise(Phases(), data, F.cross_entropy, steps=1, optimizer=torch.optim.SGD)
    assert 0 < advice.noise < 1e-3


def test_a_module_that_writes_into_its_inputs_spoils_no_batch():
    class Doubles(nn.Module):
        def forward(self, x):
            return x.mul_(2)

    inputs = INPUTS.clone()
    advice = advise(nn.Sequential(Doubles(), net()), [(inputs, LABELS)], F.cross_entropy, steps=5)
    assert torch.equal(inputs, INPUTS)
    assert advice.keep == ("1.2",)


def test_advice_does_not_depend_on_a_plan_or_a_compiler_before_it():
    expected = advise(net(), DATA, F.cross_entropy, steps=2)
    model = apply_plan(net(), PrecisionPlan.from_dict({"0": "bf16", "2": "bf16"}))
    outputs = model(INPUTS)
    assert advise(model, DATA, F.cross_entropy, steps=2) == expected
    assert torch.equal(model(INPUTS), outputs)
    model = torch.compile(net(), backend="eager")
    model(INPUTS)
    advice = advise(model, DATA, F.cross_entropy, steps=2)
    assert (advice.noise, advice.keep) == (expected.noise, ("_orig_mod.2",))


def test_first_nonfinite_sees_into_a_compiled_model():
    class Root(nn.Module):
        def forward(self, x):
            return torch.sqrt(x - 1000.0)

    model = torch.compile(net(Root()), backend="eager")
    model(INPUTS)
    assert first_nonfinite(model, DATA[0], F.cross_entropy).layer == "_orig_mod.2"


def test_buffers_that_a_forward_replaces_are_put_back():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", None)

        def forward(self, x):
            self.calls, self.last = self.calls + 1, x.detach()
            return x

    model = net(Counts())
    calls = model[2].calls
    advise(model, DATA, F.cross_entropy, steps=1)
    assert model[2].calls is calls
    assert calls == 0
    assert model[2].last is None


def test_an_optimizer_that_is_interrupted_leaves_the_users_gradients():
    class Interrupted(torch.optim.SGD):
        def step(self, closure=None):
            raise KeyboardInterrupt

    model = net()
    model[0].weight.grad = mine = torch.ones(8, 8)
    weight = model[0].weight.detach().clone()
    with pytest.raises(KeyboardInterrupt):
        advise(model, DATA, F.cross_entropy, optimizer=Interrupted)
    assert model[0].weight.grad is mine
    assert model[2].weight.grad is None
    assert torch.equal(model[0].weight, weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model": net().bfloat16()}, r"float32 .*got bfloat16; call model.float\(\) first"),
        ({"model": net().double()}, r"float32 .*got float64; call model.float\(\) first"),
        ({"model": net(first=nn.LazyLinear(8))}, "'0.weight' has none yet; run a batch"),
        ({"optimizer": torch.optim.LBFGS}, r"step\(\) without arguments, but LBFGS does not"),
    ],
)
def test_what_cannot_be_advised_on_is_said(change, said):
    arguments = {"model": net(), "batches": DATA, "loss": F.cross_entropy, "steps": 1}
    with pytest.raises(ConfigurationError, match=said):
        advise(**(arguments | change))


@pytest.mark.parametrize("around", [autocast("bf16"), torch.autocast("cpu", torch.bfloat16)])
def test_advice_is_not_taken_inside_autocast(around):
    with around, pytest.raises(ConfigurationError, match="called outside of autocast"):
        advise(net(), DATA, F.cross_entropy, steps=1)


def test_a_plan_is_not_put_on_weights_of_16_bits():
    with pytest.raises(ConfigurationError, match="weights must be float32"):
        apply_plan(net().half(), PrecisionPlan.from_dict({"0": "fp16", "2": "fp32"}))
