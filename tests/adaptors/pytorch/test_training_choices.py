"""Losses and optimizers by name compute as those of PyTorch."""

import copy

import numpy as np
import pytest
import torch
from test_quantization_aware import IMAGES, LABELS, simulation
from torch.nn import functional as F

from neural_mp import training
from neural_mp.adaptors.common.simulation import LossChoice
from neural_mp.adaptors.pytorch.training.trainer import choose_loss_function
from neural_mp.errors import ConfigurationError, DataError

RATE = 1e-2
BATCHES = [(IMAGES[i : i + 16], LABELS[i : i + 16]) for i in (0, 16, 32)]


def trained_by(optimizer, model):
    """Train by an optimizer of PyTorch, as `fit` with one epoch."""
    for inputs, targets in BATCHES:
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return model.eval().state_dict()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, {}),
        ("Adam", {"beta_1": 0.8, "epsilon": 1e-3}, {"betas": (0.8, 0.999), "eps": 1e-3}),
        ("AdamW", {"weight_decay": 0.5, "amsgrad": True}, {}),
        ("AdamW", {}, {"weight_decay": 1e-2}),
    ],
)
def test_an_optimizer_by_name_trains_as_that_of_pytorch_and_scales_do_not_decay(
    name, options, theirs
):
    model = simulation()
    with torch.no_grad():
        for scale in model.scales():  # logarithms relative to calibrated scales, 0 at first
            scale.add_(0.3)
    twin = copy.deepcopy(model)
    choice = training.OptimizerChoice(name, options)
    training.fit(model, BATCHES, F.cross_entropy, epochs=1, learning_rate=RATE, optimizer=choice)
    own = {**(theirs or options)}
    decay = own.pop("weight_decay", 0.0)
    groups = [
        {"params": list(twin.weights()), "weight_decay": decay},
        {"params": list(twin.scales()), "weight_decay": 0.0},
    ]
    expected = trained_by(getattr(torch.optim, name)(groups, lr=RATE, **own), twin)
    actual = model.state_dict()
    for key, value in expected.items():
        torch.testing.assert_close(actual[key], value, rtol=1e-4, atol=1e-5, msg=key)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_reads_class_numbers_of_any_width(dtype, reduction):
    logits = torch.randn(64, 10, generator=torch.manual_seed(0))
    loss = choose_loss_function(LossChoice(reduction=reduction))
    expected = F.cross_entropy(logits, LABELS, reduction=reduction)
    torch.testing.assert_close(loss(logits, LABELS.to(dtype)), expected)
    torch.testing.assert_close(loss(logits, LABELS.to(dtype)[:, None]), expected)
    torch.testing.assert_close(loss(logits, F.one_hot(LABELS, 10).float()), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["BinaryCrossentropy", "MeanSquaredError"])
def test_losses_of_single_outputs_read_columns_and_vectors(name, reduction):
    outputs = torch.randn(64, generator=torch.Generator().manual_seed(0))
    targets = (LABELS % 2).numpy()
    expected = {
        "BinaryCrossentropy": np.logaddexp(0, outputs.numpy()) - targets * outputs.numpy(),
        "MeanSquaredError": (outputs.numpy() - targets) ** 2,
    }[name]
    loss = choose_loss_function(LossChoice(name, reduction))
    for shape in ((64,), (64, 1)):
        for theirs in ((64,), (64, 1)):
            actual = loss(outputs.view(shape), torch.from_numpy(targets).view(theirs))
            assert float(actual) == pytest.approx(getattr(expected, reduction)(), rel=1e-5)
    with pytest.raises(DataError, match="one value for each output"):
        loss(outputs.view(64, 1), torch.zeros(64, 10))


def test_what_pytorch_lacks_is_one_error():
    with pytest.raises(ConfigurationError, match="must be one of CrossEntropyLoss, .* got Sparse"):
        choose_loss_function(LossChoice("SparseCategoricalCrossentropy"))
    choice = training.OptimizerChoice("SGD", {"nesterov": True})
    with pytest.raises(ConfigurationError, match="the optimizer SGD: Nesterov momentum requires"):
        training.fit(simulation(), BATCHES, F.cross_entropy, optimizer=choice)
