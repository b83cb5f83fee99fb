"""Quantization-aware training of torch modules: from the plan to the converted model."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp import training
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError, PlanError
from neural_mp.testing import digits, machine, uniform

TRAIN, TEST = digits()
IMAGES = torch.from_numpy(TRAIN.images[:64])
LABELS = torch.from_numpy(TRAIN.labels[:64])


class Net(nn.Module):
    """Convolutions with batch norms, a residual sum, pooling and a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.head = nn.Linear(128, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.first(x)))
        x = F.max_pool2d(torch.relu(x + self.depthwise(x)), 2)
        return self.head(x.flatten(1))


def plan_of(net, inputs=IMAGES, precision=Precision.INT8):
    adaptor = adaptor_for(net)
    space = adaptor.space(adaptor.load(net, example=inputs), machine())
    return uniform(space, precision)


def simulation(net=None, **options):
    net = net or Net().eval()
    options = {"calibration": [IMAGES], **options}
    return training.quantization_aware(net, plan_of(net), **options)


def steps(model, count, learning_rate=1e-3):
    """Train on one batch, and return the losses."""
    optimizer = torch.optim.Adam(model.parameters(), learning_rate)
    losses = []
    model.train()
    for _ in range(count):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(IMAGES).float(), LABELS)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    model.eval()
    return losses


@torch.no_grad()
def distance(model, result, inputs=IMAGES):
    """Return the largest difference of outputs, relative to the largest output."""
    expected = model(inputs)
    return float((expected - result.model(inputs)).abs().max() / expected.abs().max())


def test_the_trained_simulation_and_the_converted_model_agree():
    model = simulation()
    untrained = training.finish(model)
    assert distance(model, untrained) < 1e-2
    losses = steps(model, 40, 1e-2)
    assert losses[-1] < 0.7 * losses[0]
    result = training.finish(model)
    assert distance(model, result) < 1e-2
    assert result.audit().holds
    right = [
        float(np.mean(np.asarray(run(torch.from_numpy(TEST.images))).argmax(1) == TEST.labels))
        for run in (lambda x: model(x).detach(), result.model)
    ]
    assert abs(right[0] - right[1]) <= 0.002


def test_training_leaves_the_given_model_unchanged():
    net = Net().eval()
    original = copy.deepcopy(net.state_dict())
    steps(simulation(net), 3)
    for name, value in net.state_dict().items():
        torch.testing.assert_close(value, original[name], rtol=0, atol=0)


def test_training_starts_from_reconstructed_weights():
    """The teacher of self-distillation is the FP32 model, whose weights the plan changes."""
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)
    net, op = nn.Sequential(*layers).eval(), "2"
    plan = plan_of(net)
    plan = plan.replacing({op: replace(plan[op], corrections=("adaround", "learned_scale"))})
    model = training.quantization_aware(net, plan, calibration=[IMAGES])
    assert distance(model, training.finish(model)) < 1e-2
    with torch.no_grad():
        expected, outputs = net(IMAGES), model(IMAGES)
    noise = float((outputs - expected).square().sum() / expected.square().sum())
    progress = training.fit(model, [IMAGES], epochs=1)
    assert progress.losses[0] == pytest.approx(noise, rel=1e-3)


def test_scales_are_learned_or_stay():
    learned, fixed = simulation(), simulation(learn_scales=False)
    for model in (learned, fixed):
        steps(model, 5)
    assert any(float(scale.detach().abs().max()) > 0 for scale in learned.scales())
    assert all(float(scale.detach().abs().max()) == 0 for scale in fixed.scales())


def test_ranges_follow_the_data_until_observers_are_frozen():
    model = simulation(observe_steps=2, learn_scales=False)
    ranges = []
    model.train()
    for factor in (1, 2, 2, 4):
        model(IMAGES * factor)
        ranges.append([m.quant_params() for m in model.modules() if hasattr(m, "quant_params")])
    assert ranges[0] != ranges[1]
    assert ranges[1] == ranges[2] == ranges[3]


def test_a_checkpoint_resumes_with_scales_and_steps():
    model = simulation(observe_steps=2)
    steps(model, 3)
    resumed = simulation(observe_steps=2)
    resumed.load_state_dict(copy.deepcopy(model.state_dict()))
    assert int(resumed.steps) == 3
    assert steps(resumed, 2) == pytest.approx(steps(model, 2), rel=1e-5)


def test_a_copy_can_be_trained_and_finished_by_itself():
    model = simulation()
    duplicate = copy.deepcopy(model)
    steps(duplicate, 2)
    assert distance(duplicate, training.finish(duplicate)) < 1e-2
    assert distance(model, training.finish(model)) < 1e-2


def test_the_result_of_a_training_is_saved_and_loaded(tmp_path):
    import neural_mp

    model = simulation()
    steps(model, 2)
    result = training.finish(model)
    result.save(tmp_path / "model")
    again = neural_mp.load(tmp_path / "model")
    torch.testing.assert_close(again.model(IMAGES), result.model(IMAGES), rtol=0, atol=0)


def test_a_result_gives_its_plan_and_its_calibration():
    model = simulation()
    result = training.finish(model)
    again = training.quantization_aware(Net().eval(), result, inputs=IMAGES)
    torch.testing.assert_close(again(IMAGES), model(IMAGES), rtol=0, atol=0)


def test_a_model_without_trainable_weights_is_refused_once():
    net = Net().eval().requires_grad_(False)
    with pytest.raises(ConfigurationError, match="float weights to train"):
        simulation(net)


def test_misuse_is_named():
    net = Net().eval()
    with pytest.raises(DataError, match="calibration"):
        training.quantization_aware(net, plan_of(net), inputs=IMAGES)
    with pytest.raises(PlanError, match="plan must be"):
        training.quantization_aware(net, {"first": "int8"})
    with pytest.raises(ConfigurationError, match="made by quantization_aware"):
        training.finish(net)
    with pytest.raises(ConfigurationError, match="observe_steps"):
        simulation(net, observe_steps=-1)
