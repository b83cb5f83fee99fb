import numpy as np
import pytest
import torch
from contract_nets import Normed, Outliers, Residual, TwoOutputs, seeded
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerRescale
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.errors import PlanError
from neural_mp.testing import FACTOR, CorrectionContract, signal_to_noise
from neural_mp.testing import CorrectionCase as Case


@pytest.mark.slow
class TestCorrections(CorrectionContract):
    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        return seeded(Outliers)

    @pytest.fixture(scope="class")
    @classmethod
    def residual(cls):
        return seeded(Residual)

    @pytest.fixture(scope="class")
    @classmethod
    def two_outputs(cls):
        return seeded(TwoOutputs)

    @pytest.fixture(scope="class")
    @classmethod
    def normed(cls):
        return seeded(Normed)

    def test_the_users_own_module_is_untouched(self, case, net):
        original = {name: value.clone() for name, value in net.state_dict().items()}
        case.convert(case.corrected)
        for name, value in net.state_dict().items():
            torch.testing.assert_close(value, original[name], rtol=0, atol=0)


class Between(nn.Module):
    """Two layers over [8, 8], with something between them."""

    first: type[nn.Module] = nn.Linear
    second: type[nn.Module] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        sizes = {nn.Linear: (8, 8), nn.Conv1d: (8, 8, 3, 1, 1), nn.LayerNorm: (8,)}
        self.a, self.b = self.first(*sizes[self.first]), self.second(*sizes[self.second])
        with torch.no_grad():
            self.a.weight[3] *= FACTOR
            self.a.bias[3] *= FACTOR
            self.b.weight[:, 3] /= FACTOR

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


class DenseThenConvolution(Between):
    """Over different axes, which are of one length."""

    second = nn.Conv1d


class ConvolutionThenDense(Between):
    first = nn.Conv1d


class NormThenConvolution(Between):
    first, second = nn.LayerNorm, nn.Conv1d


class Threshold(Between):
    def forward(self, x):
        return self.b(F.threshold(self.a(x), 0.3, 0.7))


class Clipped(Between):
    def forward(self, x):
        return self.b(F.relu6(self.a(x)))


class ComputedBias(Between):
    def forward(self, x):
        return self.b(torch.relu(F.linear(x, self.a.weight, x.mean((0, 1)))))


@pytest.mark.parametrize(
    "kind",
    [
        DenseThenConvolution,
        ConvolutionThenDense,
        NormThenConvolution,
        Threshold,
        Clipped,
        ComputedBias,
    ],
)
def test_no_correction_where_the_function_would_change(kind):
    case = Case(seeded(kind), np.random.default_rng(0).random((128, 8, 8), np.float32))
    assert not case.observed.corrected_nsr
    with pytest.raises(PlanError, match="'b'"):
        case.convert(case.with_corrections_of("b", "smooth"))


class Shared(Between):
    """One layer three times, of which every use is a layer of its own."""

    def forward(self, x):
        return self.a(torch.relu(self.a(torch.relu(self.a(x)))))


def test_a_layer_used_several_times_is_changed_where_it_has_to_be():
    case = Case(seeded(Shared), np.random.default_rng(0).random((128, 8, 8), np.float32))
    assert len(case.best) == 2
    outputs = case.run(case.in_fp32(case.corrected))
    np.testing.assert_allclose(outputs, case.reference, rtol=1e-3, atol=1e-4 * FACTOR)


class TwoActivations(Between):
    """What one of them silences is loud in the other."""

    def forward(self, x):
        hidden = self.a(x)
        return self.b(torch.relu(hidden)) + self.b(F.leaky_relu(hidden, 0.5))


def nearly_silenced(net: nn.Module, data: np.ndarray, loudest: float) -> None:
    """Give channel 5 of the first layer a bias by which it is nowhere larger."""
    with torch.no_grad():
        net.a.bias[5] -= net.a(torch.from_numpy(data))[..., 5].max() - loudest


@pytest.mark.parametrize("loudest", [-0.1, 3e-6])
@pytest.mark.parametrize("repair", ["equalize", "smooth"])
def test_a_channel_silent_in_one_tensor_keeps_its_range_in_another(repair, loudest):
    net = seeded(TwoActivations)
    data = np.random.default_rng(0).standard_normal((128, 8, 8)).astype(np.float32)
    nearly_silenced(net, data, loudest)
    case = Case(net, data)
    plan = case.plain
    for op in (op for op in plan if op != "a"):
        plan = plan.replacing({op: case.with_corrections_of(op, repair)[op]})
    error = np.abs(case.run(case.convert(plan)) - case.reference).max()
    assert error < 0.05 * np.abs(case.reference).max()


def test_a_channel_that_calibration_found_silent_is_scaled_like_the_rest():
    net = seeded(Between)
    data = np.random.default_rng(0).random((128, 8, 8), np.float32)
    nearly_silenced(net, data, -0.1)
    case = Case(net, data)
    models = case.model, case.in_fp32(case.with_corrections_of("b", "smooth"))
    original, corrected = (
        case.adaptor.corrections.layer_params(model)["a"].max_output_weights() for model in models
    )
    scales = corrected / original
    heard = np.array(case.observed.channels["relu"].high) > 0
    assert not heard[5]
    assert scales[heard].min() <= scales[5] <= scales[heard].max()


def test_weights_in_bf16_are_scaled_in_bf16():
    net, data = seeded(Between).to(torch.bfloat16), (torch.randn(16, 8, 8).to(torch.bfloat16),)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=data)
    limits = adaptor.corrections.layer_params(model)["a"].max_output_weights()
    assert limits[3] > 100 * np.median(limits)
    twice, half = LayerRescale(outputs=np.full(8, 2.0)), LayerRescale(inputs=np.full(8, 0.5))
    changed = adaptor.corrections.with_layer_params(model, {"a": twice, "b": half})
    expected, outputs = (adaptor.predict(form, data) for form in (model, changed))
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)


class Sequence(nn.Module):
    """Convolutions over sequences [batch, channels, length], one channel out of proportion."""

    shape = (60, 8, 16)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, padding=1)
        with torch.no_grad():
            self.first.weight[3] *= FACTOR
            self.first.bias[3] *= FACTOR
            self.second.weight[:, 3] /= FACTOR

    def forward(self, sequence: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(sequence)))


class Windows(nn.Module):
    """A dense layer over the last of four axes, as in a vision transformer with windows."""

    shape = (60, 4, 4, 32)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(32), nn.Linear(32, 16)
        with torch.no_grad():
            self.norm.weight[3] *= FACTOR
            self.norm.bias.normal_()
            self.norm.bias[3] *= FACTOR
            self.dense.weight[:, 3] /= FACTOR

    def forward(self, windows: torch.Tensor) -> torch.Tensor:
        return self.dense(self.norm(windows))


@pytest.mark.parametrize("made", [Sequence, Windows])
def test_channels_are_where_the_layers_that_read_them_have_them(made):
    torch.manual_seed(0)
    inputs = np.random.default_rng(0).normal(size=made.shape).astype(np.float32)
    case = Case(made().eval(), inputs)
    assert signal_to_noise(case.reference, case.run(case.convert(case.plain))) < 10
    assert signal_to_noise(case.reference, case.run(case.convert(case.corrected))) > 30
