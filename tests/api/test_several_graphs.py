"""Models of several graphs: one search, one target, one result with all parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError, DataError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

DIGITS = load_digits()
IMAGES = (DIGITS.images[:, None] / 16).astype(np.float32)
TEST = range(1400, 1640, 40)


@pytest.fixture(scope="module")
def parts():
    """An encoder and a head, trained together."""
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 3e-3)
    random = np.random.default_rng(0)
    for _ in range(250):
        chosen = random.integers(0, 1400, 64)
        scores = head(encoder(torch.from_numpy(IMAGES[chosen])))
        loss = nn.functional.cross_entropy(scores, torch.from_numpy(DIGITS.target[chosen]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"encoder": encoder.eval(), "head": head.eval()}


def accuracy(models):
    """The share of digits that both parts, called one after the other, classify right."""
    right = 0
    for start in TEST:
        scores = models["head"](models["encoder"](IMAGES[start : start + 40]))
        labels = DIGITS.target[start : start + 40]
        right += int((np.asarray(scores).argmax(1) == labels).sum())
    return right / (40 * len(TEST))


def in_torch(parts):
    with torch.no_grad():
        return accuracy({n: lambda x, p=p: p(torch.as_tensor(x)) for n, p in parts.items()})


@pytest.fixture
def converter(parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = MixedPrecision(model=dict(parts), eval_func=accuracy, precisions="int8")
    run.objective = "modelsize"  # every op in INT8 pays off
    return run


def test_one_search_covers_both_parts_and_one_target_holds(converter, parts):
    result = converter()
    assert result.met
    assert result.report.baseline_accuracy == pytest.approx(in_torch(parts))
    assert result.report.accuracy >= 0.99 * result.report.baseline_accuracy
    assert {op.partition("/")[0] for op in result.plan} == {"encoder", "head"}
    assert result.plan["encoder/2"].precision == "int8"
    assert result.plan["head/0"].precision == "int8"
    assert result.report.size < 0.5 * result.report.baseline_size
    assert accuracy(result.model) == result.report.accuracy
    result.save("out")
    loaded = neural_mp.load("out")
    assert accuracy(loaded.model) == result.report.accuracy
    assert loaded.plan == result.plan
    assert loaded.audit().holds
    assert {path.name for path in Path("out").iterdir() if path.is_dir()} == {"encoder", "head"}


def test_sensitivities_are_those_of_the_joint_outputs(converter):
    report = converter.sensitivity()
    noise = {d.name: d.output_noise for d in report}
    assert {name.partition("/")[0] for name in noise} == {"encoder", "head"}
    assert all(value is not None and value > 0 for value in noise.values())


def test_parts_may_be_of_different_frameworks(converter, parts, tmp_path):
    pytest.importorskip("onnxruntime")
    options = {"input_names": ["x"], "dynamic_axes": {"x": {0: "n"}}, "dynamo": False}
    example = (torch.from_numpy(IMAGES[:2]),)
    torch.onnx.export(parts["encoder"], example, tmp_path / "encoder.onnx", **options)
    converter.model = {"encoder": "encoder.onnx", "head": parts["head"]}
    result = converter()
    assert result.met
    assert result.report.baseline_accuracy == pytest.approx(in_torch(parts))
    assert {config.precision for op, config in result.plan.items() if op.startswith("head/")} == {
        "int8"
    }
    result.save("out")
    assert accuracy(neural_mp.load("out").model) == result.report.accuracy


def test_constraints_name_a_part(converter):
    converter.exclude = ["head"]
    result = converter()
    assert {op for op in result.plan if result.plan[op].precision == "int8"} <= {
        op for op in result.plan if op.startswith("encoder/")
    }
    assert "int8" in result.plan.counts()


def test_a_plan_that_misses_the_target_jointly_is_rejected(converter):
    def strict(models):
        value = accuracy(models)
        strict.values.append(value)
        return 1.0 if len(strict.values) <= 2 else 0.5  # the recorded run and FP32

    strict.values = []
    converter.eval_func = strict
    converter.exit_policy = {"max_trials": 3}
    result = converter()
    assert result.met is False
    assert set(result.plan.counts()) <= {"fp32"}


MISTAKES = [
    ({"eval_func": None}, ConfigurationError, "requires eval_func"),
    ({"eval_dataloader": [(IMAGES[:4], 0)]}, ConfigurationError, "in place of eval_dataloader"),
    ({"model": {}}, ConfigurationError, "with at least one part"),
    ({"model": {"a/b": nn.Linear(1, 1)}}, ConfigurationError, "must be one word.* got 'a/b'"),
    ({"inputs": "x"}, ConfigurationError, "inputs and outputs must be unset"),
]


@pytest.mark.parametrize(("options", "kind", "message"), MISTAKES)
def test_mistakes_are_named(converter, options, kind, message):
    for name, value in options.items():
        setattr(converter, name, value)
    with pytest.raises(kind, match=message):
        converter()


def test_a_part_that_is_never_called_is_named(converter, parts):
    converter.model = {**parts, "spare": nn.Linear(2, 2)}
    with pytest.raises(DataError, match="did not call 'spare'"):
        converter()
