"""Learned weights in whole runs: chosen before a fallback, and reported per layer."""

import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp import AccuracyCriterion, ExitPolicy, MixedPrecision, compare
from neural_mp.adaptors.common.weights import reconstruction
from neural_mp.core.hardware import detect
from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.tuning.baseline import Baseline

FACTOR, WIDTH = 300.0, 64


class Stream(nn.Module):
    """Dense layers that add to a stream, so that no channel can be rescaled."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.first(x.flatten(1)))
        for layer in self.layers:
            x = F.relu(x + layer(x))
        return self.head(x)

    @torch.no_grad()
    def shrink(self, channels: list[int]) -> None:
        """Make channels of the stream smaller and their readers larger, for the same function."""
        for layer in (self.first, *self.layers):
            layer.weight[channels] /= FACTOR
            layer.bias[channels] /= FACTOR
        for layer in (*self.layers, self.head):
            layer.weight[:, channels] *= FACTOR


@pytest.fixture(scope="module")
def stream(digits) -> Stream:
    torch.manual_seed(0)
    net = Stream()
    images, labels = (torch.tensor(part) for part in (digits[0].images, digits[0].labels))
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(20):
        for part in torch.randperm(len(images)).split(50):
            optimizer.zero_grad()
            F.cross_entropy(net(images[part]), labels[part].long()).backward()
            optimizer.step()
    net.shrink([3, 17, 40, 60])
    return net.eval()


@pytest.fixture
def converter(stream, digits, accuracy, tmp_path) -> MixedPrecision:
    tuner = MixedPrecision()
    tuner.model = stream
    tuner.precisions = "int8"
    tuner.objective = "modelsize"
    tuner.metric = accuracy
    tuner.accuracy_criterion = AccuracyCriterion(0.03)
    tuner.eval_dataloader = digits[1].loader()
    tuner.calib_dataloader = digits[0].loader()
    tuner.workspace = tmp_path
    return tuner


def check_stages(result, converter, stages):
    """Assert the noise at each stage; that of the result is the one of a comparison."""
    noise = result.report.stage_noise
    assert [stage.value for stage in noise.measured_stages] == stages
    assert noise.ops.keys() == set(result.plan)
    first = next(iter(converter.calib_dataloader))[0]
    compared = compare(converter.model, result, [first])
    assert noise.samples == len(first)
    assert noise.outputs[stages[-1]] == pytest.approx(compared.outputs[0].noise, rel=1e-3)
    last = compared.layers[-1]
    assert noise.ops[last.name][stages[-1]] == pytest.approx(last.noise, rel=1e-3)
    assert noise.outputs[stages[-1]] < noise.outputs["nearest"]


@pytest.mark.slow
def test_a_run_learns_weights_before_it_gives_up_int8(converter):
    result = converter()
    lost, learned = result.trials
    assert lost.accuracy < result.report.baseline_accuracy - 0.3
    assert learned.met
    assert len(result.plan) == 5
    assert all(config.is_reconstructed for config in result.plan.values())
    assert 0 < result.report.seconds["reconstruction"] < result.report.seconds["search"]
    reasons = {reason for row in result.sensitivity() for reason in [row.reason]}
    for op in result.plan:
        assert any(f"relative error of results: {op} " in reason for reason in reasons)
    check_stages(result, converter, ["nearest", "reconstructed"])
    errors = result.record.measured.layer_errors
    assert errors.keys() == set(result.plan)
    assert np.mean([entry["learned"] / entry["nearest"] for entry in errors.values()]) < 0.5


def trial_with_learned_weights(result):
    """Return the first trial with learned weights."""
    return next(
        trial
        for trial in result.trials
        if any(config.is_reconstructed for config in trial.plan.values())
    )


class LateLayers:
    """Learning of layers, after the second of which the clock shows the end of a time limit."""

    limit = 1000.0

    def __init__(self, monkeypatch):
        self.learned, self.late = 0, 0.0
        self.learn, clock = reconstruction.reconstruct_layer_weight, time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: clock() + self.late)
        monkeypatch.setattr(reconstruction, "reconstruct_layer_weight", self)

    def __call__(self, *args, **options):
        result = self.learn(*args, **options)
        self.learned += 1
        if self.learned == 2:
            self.late += self.limit - 100  # of which the time to evaluate is left
        return result


@pytest.mark.slow
@pytest.mark.skipif(
    detect().int8_accumulation is Int8Accumulation.SATURATING,
    reason="with weights in 7 bits, two learned layers are not worth a trial",
)
def test_a_time_limit_ends_learning_and_what_was_learned_is_evaluated(converter, monkeypatch):
    layers = LateLayers(monkeypatch)
    converter.exit_policy = ExitPolicy(timeout=layers.limit)
    monkeypatch.setattr(Baseline, "reserved_seconds", 150.0)
    result = converter()
    assert layers.learned == 2
    learned = trial_with_learned_weights(result)
    assert learned.accuracy is not None
    assert any("learning of weights ended at the time limit" in w for w in result.report.warnings)
    assert len(result.record.measured.layer_errors) == 2
    converter.resume = True
    again = converter()
    assert layers.learned == 2
    assert trial_with_learned_weights(again).accuracy == learned.accuracy
    converter.resume = False
    layers.late = 0
    converter()
    assert layers.learned >= 5  # a new run does not start from weights that were not learned
