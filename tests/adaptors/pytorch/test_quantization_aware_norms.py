"""Batch norms in quantization-aware training: batch statistics, then frozen."""

import copy

import torch
from test_quantization_aware import IMAGES, LABELS, Net, distance, simulation, steps
from torch.nn import functional as F

from neural_mp import training


def normed(model):
    (layer,) = (m for m in model.modules() if hasattr(m, "trains_norm"))
    return layer


def trained_net():
    """A net whose running statistics are those of the images."""
    net = Net().train()
    for _ in range(40):
        net(IMAGES)
    return net.eval()


def test_a_norm_trains_as_in_fp32():
    """In the phase of batch statistics, results and gradients are those of FP32, but for rounding.

    The reference is torch's own batch norm on the same images.
    """
    net = trained_net()
    # Ranges that clip nothing under either statistics.
    model = simulation(net, norm_steps=5, calibration=[IMAGES * 2]).train()
    images = IMAGES.square() * 0.8  # other statistics than the running ones
    net.train()
    outputs, expected = model(images), net(images)
    assert float((outputs - expected).detach().norm() / expected.detach().norm()) < 0.03
    F.cross_entropy(outputs, LABELS).backward()
    F.cross_entropy(expected, LABELS).backward()
    layer = normed(model)
    pairs = [
        (layer.weight.grad, net.first.weight.grad),
        (layer.norm_weight.grad, net.norm.weight.grad),
        (layer.norm_bias.grad, net.norm.bias.grad),
    ]
    for actual, reference in pairs:
        assert float((actual - reference).norm() / reference.norm()) < 0.2
    torch.testing.assert_close(layer.running_mean, net.norm.running_mean, rtol=0.05, atol=0.01)
    torch.testing.assert_close(layer.running_var, net.norm.running_var, rtol=0.05, atol=0.01)


def test_a_norm_is_frozen_after_its_steps():
    model = simulation(trained_net(), norm_steps=2)
    layer, variances = normed(model), []
    model.train()
    for factor in (1, 2, 3, 4):
        model(IMAGES * factor)
        variances.append(layer.running_var.clone())
    assert not torch.equal(variances[0], variances[1])
    assert torch.equal(variances[1], variances[3])
    model.eval()
    frozen = model(IMAGES)
    model.train()
    torch.testing.assert_close(model(IMAGES), frozen, rtol=0, atol=0)


def test_simulation_and_converted_model_agree_in_every_phase():
    model = simulation(trained_net(), norm_steps=8)
    assert distance(model, training.finish(model)) < 1e-2
    for _ in range(3):
        steps(model, 5)
        assert distance(model, training.finish(model)) < 1e-2
    resumed = simulation(trained_net(), norm_steps=8)
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(resumed.eval()(IMAGES), model(IMAGES), rtol=0, atol=0)
