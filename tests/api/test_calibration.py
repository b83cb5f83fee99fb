"""`neural_mp.calibration`: the inputs of calls that the user's own loop makes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import DataError, UnknownFrameworkError


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)).eval()


def test_every_call_is_recorded_as_a_copy_and_the_model_runs_as_before(net):
    batch = torch.randn(8, 32)
    with neural_mp.calibration(net) as calibrated:
        outputs = net(batch)
        expected = batch.clone()
        batch.zero_()
        net(torch.ones(4, 32))
    net(batch)
    assert torch.equal(outputs, net(expected))
    first, second = calibrated
    assert torch.equal(first, expected)
    assert torch.equal(second, torch.ones(4, 32))
    assert calibrated.samples == 12


def test_recording_ends_with_the_requested_number_of_samples(net):
    with neural_mp.calibration(net, samples=10) as calibrated:
        for _ in range(5):
            net(torch.randn(8, 32))
    assert len(calibrated) == 2


def test_ranges_of_the_recorded_calls_are_those_of_the_same_batches(net):
    batches = [torch.randn(8, 32) for _ in range(3)]
    with neural_mp.calibration(net) as calibrated:
        for batch in batches:
            net(batch)
    plans = []
    for data in (calibrated, batches):
        converter = MixedPrecision(
            model=net, precisions="int8", calib_dataloader=data, approach="static"
        )
        converter.exit_policy = {"performance_only": True}
        plans.append(converter().observations.ranges)
    assert plans[0] == plans[1]


def test_arguments_by_name_are_recorded_by_name():
    class Sum(nn.Module):
        def forward(self, left, right, scale=1.0):
            return (left + right) * scale

    model = Sum()
    with neural_mp.calibration(model) as calibrated:
        model(torch.ones(2, 3), right=torch.zeros(2, 3))
    (inputs,) = calibrated
    assert set(inputs) == {"left", "right"}


def test_continued_calls_of_a_decoder_are_not_recorded():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    decoder = LlamaForCausalLM(LlamaConfig(vocab_size=64, num_hidden_layers=1, **sizes, **ends))
    tokens = torch.randint(1, 64, (2, 6))
    with neural_mp.calibration(decoder.eval()) as calibrated:
        decoder.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=3)
    (inputs,) = calibrated
    assert torch.equal(inputs["input_ids"], tokens)
    assert "past_key_values" not in inputs


def test_no_call_and_no_model_are_errors(net):
    with neural_mp.calibration(net) as calibrated:
        pass
    with pytest.raises(DataError, match="no call"):
        list(calibrated)
    with pytest.raises(UnknownFrameworkError), neural_mp.calibration(object()):
        pass
