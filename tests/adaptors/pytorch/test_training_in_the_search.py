"""A search without a plan that meets the target trains the most promising plan."""

import json
import math
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from test_quantization_aware import IMAGES, LABELS, TEST, TRAIN, Net
from torch import nn
from torch.nn import functional as F
from trained_searches import CountingEpochs, check_trained

from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.baseline import Baseline

BATCHES = [
    (torch.from_numpy(TRAIN.images[i : i + 50]), torch.from_numpy(TRAIN.labels[i : i + 50]))
    for i in range(0, 1200, 50)
]


@cache
def trained_net():
    """A net that all-INT8 plans damage: the channels of its first result differ 1000 times."""
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1, groups=16)
    last = nn.Conv2d(16, 32, 1, stride=2)
    layers = first, nn.ReLU(), second, nn.ReLU(), last, nn.ReLU(), nn.Flatten(), nn.Linear(512, 10)
    net = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(net.parameters())
    for epoch in range(12):
        optimizer.param_groups[0]["lr"] = 5e-3 * 0.5 * (1 + math.cos(math.pi * epoch / 12))
        for images, labels in BATCHES:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()
    with torch.no_grad():
        factors = torch.logspace(0, 3, 16)
        first.weight.mul_(factors[:, None, None, None])
        first.bias.mul_(factors)
        second.weight.div_(factors[:, None, None, None])
    return net.eval()


@torch.no_grad()
def accuracy(model):
    outputs = torch.as_tensor(model(torch.from_numpy(TEST.images)))
    return float((outputs.argmax(1) == torch.from_numpy(TEST.labels)).float().mean())


def search(folder, **options):
    """Return a search whose only plan, all layers in INT8 without corrections, misses."""
    defaults = {
        "precisions": "int8",
        "strategy": "basic",
        "calib_dataloader": [images.numpy() for images, _ in BATCHES[:4]],
        "eval_func": accuracy,
        "accuracy_criterion": {"absolute": 0.025},
        "objective": "modelsize",
        "exit_policy": {"max_trials": 1, "train_seconds": 600},
        "train_dataloader": BATCHES,
        "loss": F.cross_entropy,
        "workspace": folder,
    }
    conf = options.pop("conf", None)
    return MixedPrecision(conf, model=trained_net(), **{**defaults, **options})


def check(result):
    """Assert that training saved the plan of the only other trial."""
    check_trained(result)
    missed, trained = result.trials
    assert trained.accuracy > missed.accuracy + 0.02
    assert result.plan.counts()["int8"] >= 4
    assert accuracy(result.model) == pytest.approx(trained.accuracy, abs=1e-6)


@pytest.mark.slow
def test_the_most_promising_plan_is_trained_and_a_resumed_run_continues(tmp_path):
    result = search(tmp_path, epochs=10).fit()
    check(result)
    batches = CountingEpochs(BATCHES)
    again = search(tmp_path, epochs=10, train_dataloader=batches, resume=True).fit()
    assert batches.epochs == 0
    check(again)
    assert again.report.accuracy == result.report.accuracy


#: Where the killed process finds this file and what it imports.
FOLDERS = [str(Path(__file__).parents[n]) for n in (0, 2)]
KILLED = """
import sys
sys.path[:0] = {folders!r}
from test_training_in_the_search import BATCHES, CountingEpochs, search
search({folder!r}, epochs=10, train_dataloader=CountingEpochs(BATCHES, killed=4)).fit()
"""


@pytest.mark.slow
def test_a_run_killed_in_training_repeats_no_trial_and_no_epoch(tmp_path):
    code = KILLED.format(folders=FOLDERS, folder=str(tmp_path))
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    batches = CountingEpochs(BATCHES)
    result = search(tmp_path, epochs=10, train_dataloader=batches, resume=True).fit()
    assert batches.epochs == 7
    check(result)
    whole = search(tmp_path / "whole", epochs=10).fit()
    assert result.report.accuracy == whole.report.accuracy


@pytest.mark.slow
def test_the_users_own_function_trains(tmp_path):
    def train(model):
        optimizer = torch.optim.Adam(model.parameters())
        for epoch in range(10):
            optimizer.param_groups[0]["lr"] = 5e-3 * 0.5 * (1 + math.cos(math.pi * epoch / 10))
            for images, labels in BATCHES:
                optimizer.zero_grad()
                F.cross_entropy(model(images), labels).backward()
                optimizer.step()

    options = {"train_dataloader": None, "loss": None, "train_func": train}
    check(search(tmp_path, **options).fit())


@pytest.mark.slow
def test_training_starts_from_the_reconstructed_plan_if_no_plan_is_better(tmp_path):
    started, evaluations = [], []

    def evaluate(model):
        evaluations.append(accuracy(model))
        return 1.0 if len(evaluations) == 1 else evaluations[-1]  # out of reach for a plan

    result = search(
        tmp_path,
        eval_func=evaluate,
        strategy="mincut",
        objective="performance",
        exit_policy={"max_trials": 2},  # to nearest, then reconstructed
        train_dataloader=None,
        loss=None,
        train_func=lambda model: started.append(accuracy(model)),
    ).fit()
    nearest, reconstructed, trained = result.trials
    is_learned = [
        any(config.is_reconstructed for config in trial.plan.configs.values())
        for trial in result.trials
    ]
    assert trained.trained
    assert is_learned == [False, True, reconstructed.accuracy >= nearest.accuracy]
    assert started == [pytest.approx(max(nearest.accuracy, reconstructed.accuracy), abs=0.002)]


class LateBatches:
    """Batches of which the second epoch ends shortly before the time limit of the run."""

    limit = 1000.0

    def __init__(self, monkeypatch):
        self.epochs, self.late = 0, 0.0
        clock = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self.late)

    def __iter__(self):
        self.epochs += 1
        for number, batch in enumerate(BATCHES):
            if self.epochs == 2 and number == 3:
                self.late = self.limit - 100
            yield batch


@pytest.mark.slow
def test_a_time_limit_ends_training_and_the_best_epoch_is_evaluated(tmp_path, monkeypatch):
    batches = LateBatches(monkeypatch)
    monkeypatch.setattr(Baseline, "reserved_seconds", 150.0)
    limits = {"max_trials": 1, "train_seconds": 5000, "timeout": batches.limit}
    options = {"train_dataloader": batches, "epochs": 10}
    result = search(tmp_path, exit_policy=limits, **options).fit()
    assert batches.epochs == 2
    missed, trained = result.trials
    assert trained.trained
    assert trained.accuracy > missed.accuracy
    (file,) = tmp_path.glob("training/*/training.json")
    progress = json.loads(file.read_text())
    assert len(progress["losses"]) == 2
    assert not progress["complete"]


@pytest.mark.slow
def test_without_time_left_the_plan_is_not_trained_and_the_run_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(Baseline, "reserved_seconds", 2000.0)
    limits = {"max_trials": 1, "train_seconds": 5000, "timeout": 1000}
    batches = CountingEpochs(BATCHES)
    result = search(tmp_path, exit_policy=limits, train_dataloader=batches, epochs=10).fit()
    assert (batches.epochs, len(result.trials), result.met) == (0, 1, False)
    note = "the plan of trial 1 was not trained: no time was left; set a longer timeout, and resume"
    assert note in result.report.warnings


def test_options_that_do_not_fit_are_named(tmp_path):
    def refused(message, **options):
        arguments = {"model": Net().eval(), "calib_dataloader": [IMAGES], "workspace": tmp_path}
        with pytest.raises(ConfigurationError, match=message):
            MixedPrecision(**{**arguments, "eval_func": lambda model: 1.0, **options}).fit()

    refused("must be set together", train_dataloader=[(IMAGES, LABELS)])
    refused("train_func must be a function", train_func="train")
    refused("train_seconds", exit_policy={"train_seconds": -1})


FILE = """
version: 1.0
model: {{name: net, framework: pytorch}}
quantization:
  approach: quant_aware_training
  train:
    start_epoch: 0
    end_epoch: 10
    iteration: 20
    dataloader:
      batch_size: 50
      dataset: {{"numpy": {{inputs: {0}/images.npy, labels: {0}/labels.npy}}}}
    optimizer: {{{1}: {{learning_rate: 0.005}}}}
    criterion: {{CrossEntropyLoss: {{reduction: mean}}}}
tuning: {{accuracy_criterion: {{absolute: 0.025}}}}
"""


def from_file(folder, optimizer="Adam", **options):
    """Return the search with the training of a file of INC 1.x."""
    np.save(folder / "images.npy", TRAIN.images[:1200])
    np.save(folder / "labels.npy", TRAIN.labels[:1200].astype(np.int32))
    (folder / "conf.yaml").write_text(FILE.format(folder, optimizer))
    defaults = {"train_dataloader": None, "loss": None, "exit_policy": {"max_trials": 1}}
    return search(folder, conf=str(folder / "conf.yaml"), **{**defaults, **options})


@pytest.mark.slow
def test_a_file_of_inc_trains_with_its_section(tmp_path):
    result = from_file(tmp_path).fit()
    check(result)
    (file,) = tmp_path.glob("training/*/training.json")
    assert len(json.loads(file.read_text())["losses"]) == 10
