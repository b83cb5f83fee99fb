"""Limits of size: the most accurate model within them, and errors."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError
from neural_mp.strategies.bit_allocation import count_weight_bits


class Chain(nn.Module):
    """Three dense layers; the outputs depend on the last one most."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + 0.01 * torch.relu(self.first(x))
        return self.last(hidden + 0.01 * torch.relu(self.second(hidden)))


@pytest.fixture(scope="module")
def net() -> nn.Module:
    torch.manual_seed(0)
    return Chain().eval()


@pytest.fixture(scope="module")
def batches() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(16, 64) for _ in range(3)]


def _result(net, batches, tmp_path, **options):
    converter = MixedPrecision(precisions="int2,int4,int8", workspace=tmp_path, **options)
    converter.model = net
    converter.calib_dataloader = batches
    return converter()


FP32_BYTES = 4 * 3 * (64 * 64 + 64)
LIMITS = (3.5, 4.6, 6.0, 12.0)


@pytest.fixture(scope="module")
def within(net, batches, tmp_path_factory):
    """Return the result for a limit in bits; each is made once."""
    return cache(
        lambda bits: _result(net, batches, tmp_path_factory.mktemp("limit"), max_bits=bits)
    )


@pytest.mark.parametrize("bits", LIMITS)
def test_the_model_fits_into_the_limit_and_uses_most_of_it(within, bits):
    result = within(bits)
    assert result.report.size <= FP32_BYTES * bits / 32
    assert result.report.size >= 0.7 * FP32_BYTES * bits / 32
    assert result.met is None
    assert result.report.evaluations == 0
    assert any("max_bits" in warning for warning in result.report.warnings)


def test_more_bytes_are_spent_on_the_weights_that_matter_most(net, batches, tmp_path):
    result = _result(net, batches, tmp_path, max_bytes=10_000)
    assert 0.7 * 10_000 <= result.report.size <= 10_000
    bits = {op: count_weight_bits(result.plan[op]) for op in ("first", "second", "last")}
    assert bits["last"] > max(bits["first"], bits["second"])


def test_larger_limits_yield_more_accurate_models(net, batches, within):
    noise = []
    for bits in LIMITS:
        with torch.no_grad():
            noise.append(float((within(bits)(batches[0]) - net(batches[0])).square().mean()))
    assert noise == sorted(noise, reverse=True)


def test_a_limit_below_every_plan_names_the_smallest_size(net, batches, tmp_path):
    with pytest.raises(ConfigurationError, match=r"max_bytes = 1000 .*at least .*\d{4} bytes"):
        _result(net, batches, tmp_path, max_bytes=1000)


def test_a_model_without_such_weights_is_named(batches, tmp_path):
    net = nn.Sequential(nn.ReLU(), nn.Flatten()).eval()
    with pytest.raises(ConfigurationError, match="requires ops whose weights"):
        _result(net, batches, tmp_path, max_bits=4.0)


def test_two_limits_exclude_each_other_and_values_are_checked(net, batches, tmp_path):
    with pytest.raises(ConfigurationError, match="exclude each other"):
        _result(net, batches, tmp_path, max_bits=4.0, max_bytes=10)
    with pytest.raises(ConfigurationError, match="max_bits must be a number of bits"):
        _result(net, batches, tmp_path, max_bits=64)
    with pytest.raises(ConfigurationError, match=r"tuning.max_bytes.*whole number from 1"):
        MixedPrecision({"tuning": {"max_bytes": 0}})


def test_a_tuning_file_sets_a_limit():
    assert MixedPrecision({"tuning": {"max_bits": 4.5}}).max_bits == 4.5
    assert json.dumps(MixedPrecision({"tuning": {"max_bytes": 10}}).max_bytes) == "10"


class Tied(nn.Module):
    """A table and a head of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(512, 64), nn.Linear(64, 512, bias=False)
        self.middle = nn.Linear(64, 64)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(self.table(ids)))


@pytest.mark.parametrize("exclude", ["head", "table"])
def test_a_tied_weight_that_stays_for_another_op_is_not_stored_again(tmp_path, exclude):
    torch.manual_seed(0)
    converter = MixedPrecision(precisions="int4,int8", workspace=tmp_path)
    converter.model, converter.exclude = Tied().eval(), [exclude]
    converter.calib_dataloader = [torch.randint(512, (4, 8)) for _ in range(2)]
    converter.max_bytes = 4 * 512 * 64 + 64 * 64 + 1024
    result = converter()
    assert result.report.size <= converter.max_bytes
    assert set(result.plan.counts()) == {"fp32", "int8"}
