"""What people come to do, from the docs alone; the examples hold the longer stories."""

import asyncio

import numpy as np
import pytest
import torch
import yaml

import neural_mp
from neural_mp import MixedPrecision, Precision


@pytest.fixture(autouse=True)
def _quick(quick_runs):
    pass


@pytest.fixture
def converter(net, digits, accuracy):
    return MixedPrecision(
        model=net,
        precisions="int8",
        metric=accuracy,
        eval_dataloader=digits[1].loader(),
        objective="modelsize",
    )


def test_the_smallest_model_that_is_good_enough(converter, net, digits):
    result = converter()
    assert result.met
    assert result.report.size < 0.35 * sum(p.nbytes for p in net.parameters())
    assert result.report.accuracy >= 0.99 * result.report.baseline_accuracy


@pytest.mark.slow
def test_which_layers_hurt(converter, hostile_net):
    """One channel between the second and the third convolution is 1024 times as large."""
    converter.model = hostile_net
    noise = converter().observations.nsr
    first, second = sorted(noise.values(), reverse=True)[:2]
    worst = max(noise, key=noise.get)
    convolutions = [n for n, m in hostile_net.named_modules() if isinstance(m, torch.nn.Conv2d)]
    assert int(convolutions[1]) < int(worst) < int(convolutions[2])
    assert first > 10 * second


def test_in_a_notebook_whose_event_loop_runs(converter, digits):
    async def cell():
        return converter()

    result = asyncio.run(cell())
    assert result.met
    assert result(digits[1].images[:3]).shape == (3, 10)


def test_a_plan_is_edited_in_a_text_editor_and_replayed(converter, net, digits, tmp_path):
    result = converter()
    result.save_plan(tmp_path / "plan.yaml")
    written = (tmp_path / "plan.yaml").read_text(encoding="utf-8")
    edited = next(op for op, config in result.plan.items() if config.precision is Precision.INT8)
    content = yaml.safe_load(written)
    plan = content["plan"] if "plan" in content else content["ops"]
    plan[edited] = "fp32"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    replayed = neural_mp.convert_with_plan(net, tmp_path / "plan.yaml", inputs=digits[1].images[:8])
    changed = {op for op, config in result.plan.items() if replayed.plan[op] != config}
    assert changed == {edited}
    original, modified = (model(digits[1].images[:50]) for model in (result, replayed))
    assert not np.array_equal(original, modified)
    assert (original.argmax(1) == modified.argmax(1)).mean() > 0.9
