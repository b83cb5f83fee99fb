"""Fisher probe: scores of rounded weights, compared with divergences measured one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import nn

from neural_mp.adaptors.common import sensitivity
from neural_mp.adaptors.common.sensitivity import (
    draw_direction,
    measure_weight_noise,
)
from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConversionError
from neural_mp.testing import machine

MACHINE = machine()


class Classifier(nn.Module):
    """Logits under a name, from layers of very different importance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 64)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.head = nn.Linear(64, 16)
        with torch.no_grad():
            for scale, layer in zip((0.3, 1, 3, 0.1), self.layers, strict=True):
                layer.weight.mul_(scale)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.table(x)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden))
        return {"logits": self.head(hidden)}


@pytest.fixture(scope="module")
def scored():
    torch.manual_seed(0)
    net = Classifier().eval()
    data = torch.randint(0, 40, (48, 6))
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=data[:2])
    space = adaptor.space(model, MACHINE).without_data()
    return net, data, measure_weight_noise(adaptor, model, data.split(12), space)


def _rounded(weight: np.ndarray, spec: QuantSpec) -> np.ndarray:
    if spec.group_size is not None:
        return Quantizer(spec).round_to_nearest(weight).to_floats()
    scales = np.abs(weight).max(axis=1, keepdims=True) / 127
    return np.rint(weight / scales) * scales


def _divergence(net: nn.Module, data: torch.Tensor, name: str, spec: QuantSpec) -> float:
    """Return the mean KL divergence with one weight rounded, in float64."""
    weight = net.get_submodule(name).weight
    original = weight.detach().clone()
    with torch.no_grad():
        truth = log_softmax(net(data)["logits"].double().numpy(), -1)
        weight.copy_(torch.from_numpy(_rounded(original.numpy(), spec)))
        quantized = log_softmax(net(data)["logits"].double().numpy(), -1)
        weight.copy_(original)
    return float((np.exp(truth) * (truth - quantized)).sum(-1).mean())


def test_scores_rank_layers_and_forms_as_exact_divergences_do(scored):
    net, data, scores = scored
    pairs = [
        (score, _divergence(net, data, op, QuantSpec.parse(text)))
        for op, forms in scores.items()
        for text, score in forms.items()
    ]
    assert len(pairs) >= 12
    ranks = np.argsort(np.argsort(pairs, axis=0), axis=0)
    assert np.corrcoef(ranks.T)[0, 1] > 0.95  # Spearman's


def test_a_score_is_the_divergence_of_a_prediction(scored):
    net, data, scores = scored
    ratios = [
        forms[text] / _divergence(net, data, op, QuantSpec.parse(text))
        for op, forms in scores.items()
        for text in forms
    ]
    assert 0.6 < np.median(ratios) < 1.6


def test_scores_do_not_depend_on_the_memory_for_rounding_errors(scored, monkeypatch):
    net, data, scores = scored
    monkeypatch.setattr(sensitivity, "_CHANGE_BYTES", 1)  # one weight at a time
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=data[:2])
    space = adaptor.space(model, MACHINE).without_data()
    again = measure_weight_noise(adaptor, model, data.split(12), space)
    assert again == {op: pytest.approx(forms) for op, forms in scores.items()}


def test_the_direction_at_logits_is_the_mean_zero_gradient_of_a_drawn_class():
    logits = np.random.default_rng(0).normal(size=(2000, 5)).astype(np.float32)[:1].repeat(4000, 0)
    (gradient,) = draw_direction([logits], True, np.random.default_rng(1))
    chances = np.exp(log_softmax(logits[0].astype(np.float64)))
    np.testing.assert_allclose(gradient.sum(axis=1), 0, atol=1e-6)
    np.testing.assert_allclose(gradient.mean(axis=0), 0, atol=0.03)
    np.testing.assert_allclose((gradient.argmax(1) == 0).mean(), chances[0], atol=0.03)


def test_other_outputs_are_scored_by_the_noise_they_receive():
    torch.manual_seed(0)
    layer = nn.Linear(64, 16)
    net, data = nn.Sequential(layer).eval(), torch.randn(48, 64)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=data[:2])
    ((_, forms),) = measure_weight_noise(
        adaptor, model, data.split(16), adaptor.space(model, MACHINE).without_data()
    ).items()
    text = "uint4 asymmetric per_group 64 minmax"
    weight = layer.weight.detach().numpy()
    moved = (_rounded(weight, QuantSpec.parse(text)) - weight) @ data.numpy().T
    assert forms[text] == pytest.approx(np.square(moved).sum(0).mean() / 2, rel=0.4)


def test_a_framework_without_gradients_is_named():
    adaptor = PyTorchAdaptor()
    model = adaptor.load(nn.Sequential(nn.Linear(64, 16)).eval(), example=torch.zeros(2, 64))
    space = adaptor.space(model, MACHINE)
    adaptor.gradients = None
    with pytest.raises(ConversionError, match="gradients of weights"):
        measure_weight_noise(adaptor, model, [], space)
