"""The training loop: best epoch, resumption after a kill, budget, NaN, self-distillation."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from test_quantization_aware import (
    IMAGES,
    LABELS,
    TEST,
    TRAIN,
    distance,
    plan_of,
    simulation,
)
from torch import nn
from torch.nn import functional as F

from neural_mp import training
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError, TrainingError

BATCHES = [(IMAGES[i : i + 16], LABELS[i : i + 16]) for i in range(0, 64, 16)]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0)


def test_training_with_a_loss_ends_with_the_best_epoch():
    model = simulation()
    snapshots = []

    def evaluate(trained):
        snapshots.append(weights(trained))
        return [0.1, 0.2, 0.5, 0.3][len(snapshots) - 1]

    progress = training.fit(model, BATCHES, F.cross_entropy, epochs=3, evaluate=evaluate)
    assert progress.complete
    assert progress.best == 2
    assert progress.losses[-1] < progress.losses[0]
    assert_same(weights(model), snapshots[2])
    assert distance(model, training.finish(model)) < 1e-2


def test_without_labels_outputs_approach_those_of_the_fp32_model():
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
    net = nn.Sequential(nn.Flatten(), *layers).eval()
    plan = plan_of(net, precision=Precision.INT4)
    model = training.quantization_aware(net, plan, calibration=[IMAGES])
    images, unseen = (torch.from_numpy(split.images) for split in (TRAIN, TEST))

    @torch.no_grad()
    def noise(run):
        return float((run(unseen) - net(unseen)).square().sum())

    initial = noise(model)
    progress = training.fit(model, images.split(100), epochs=16, learning_rate=2e-3)
    assert progress.losses[-1] < 0.5 * progress.losses[0]
    assert noise(model) < 0.6 * initial
    assert noise(training.finish(model).model) < 0.6 * initial


def test_interrupted_training_continues_after_its_last_epoch(tmp_path):
    options = {"loss": F.cross_entropy, "epochs": 4}
    whole, parts = simulation(), simulation()
    training.fit(whole, BATCHES, **options)

    def stop(batches, limit):
        for number, batch in enumerate(batches * 10):
            if number == limit:
                raise KeyboardInterrupt
            yield batch

    class Stopping:
        """Batches of two epochs and a half."""

        epochs = 0

        def __iter__(self):
            self.epochs += 1
            return stop(BATCHES, 2) if self.epochs == 3 else iter(BATCHES)

    with pytest.raises(KeyboardInterrupt):
        training.fit(parts, Stopping(), folder=tmp_path, **options)
    again = simulation()
    progress = training.fit(again, BATCHES, folder=tmp_path, **options)
    assert progress.epochs == 4
    assert_same(weights(again), weights(whole))


#: Where the killed process finds this file and what it imports.
FOLDERS = [str(Path(__file__).parents[n]) for n in (0, 2)]
KILLED = """
import sys
sys.path[:0] = {folders!r}
from test_quantization_aware_fit import BATCHES, F, simulation, training
from trained_searches import CountingEpochs
batches = CountingEpochs(BATCHES, killed=3)
training.fit(simulation(), batches, F.cross_entropy, epochs=4, folder={folder!r})
"""


@pytest.mark.slow
def test_a_killed_training_continues_after_its_last_epoch(tmp_path):
    code = KILLED.format(folders=FOLDERS, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert len(json.loads((tmp_path / "training.json").read_text())["losses"]) == 2
    again, whole = simulation(), simulation()
    training.fit(again, BATCHES, F.cross_entropy, epochs=4, folder=tmp_path)
    training.fit(whole, BATCHES, F.cross_entropy, epochs=4)
    assert_same(weights(again), weights(whole))


def test_nan_names_the_layer_and_leaves_the_best_epoch(tmp_path):
    model = simulation()
    training.fit(model, BATCHES, F.cross_entropy, epochs=1, folder=tmp_path)
    best = weights(model)
    broken = weights(model)
    name = next(name for name in broken if "depthwise_bias" in name)

    class Breaking:
        """Batches whose reading breaks a weight, as a gradient of Inf would."""

        def __iter__(self):
            with torch.no_grad():
                model.get_parameter(name)[2] = torch.nan
            return iter(BATCHES)

    with pytest.raises(TrainingError, match=r"loss is nan in step 1 of epoch 2.*'depthwise'"):
        training.fit(model, Breaking(), F.cross_entropy, epochs=2, folder=tmp_path)
    assert_same(weights(model), best)
    assert (tmp_path / "epoch_1.state").is_file()
    with pytest.raises(TrainingError, match="input"):
        training.fit(simulation(), [torch.full_like(IMAGES, np.nan)], epochs=1)


def test_the_budget_ends_training():
    progress = training.fit(simulation(), BATCHES, F.cross_entropy, epochs=9, seconds=1e-9)
    assert not progress.complete
    assert progress.epochs == 0


def test_misuse_of_the_loop_is_named(tmp_path):
    model = simulation()
    with pytest.raises(DataError, match="once per epoch"):
        training.fit(model, iter(BATCHES), F.cross_entropy)
    with pytest.raises(DataError, match="got none"):
        training.fit(model, [], F.cross_entropy)
    with pytest.raises(DataError, match=r"\(inputs, targets\)"):
        training.fit(model, [IMAGES], F.cross_entropy)
    with pytest.raises(ConfigurationError, match="loss must be a function"):
        training.fit(model, BATCHES, "cross_entropy")
    training.fit(model, BATCHES, F.cross_entropy, epochs=1, folder=tmp_path)
    (tmp_path / "epoch_1.state").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="checkpoint must be"):
        training.fit(model, BATCHES, F.cross_entropy, epochs=2, folder=tmp_path)


def test_a_gradient_that_is_nan_changes_no_weight():
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.nan

    def loss(outputs, labels):
        return F.cross_entropy(Broken.apply(outputs), labels)

    model = simulation()
    best = weights(model)
    with pytest.raises(TrainingError, match="the first NaN or Inf is the loss or a gradient"):
        training.fit(model, BATCHES, loss, epochs=1)
    assert_same(weights(model), best)


def test_a_model_that_is_no_simulation_is_refused():
    with pytest.raises(ConfigurationError, match="made by quantization_aware, got a Linear"):
        training.fit(torch.nn.Linear(4, 4), [torch.zeros(2, 4)], epochs=1)
