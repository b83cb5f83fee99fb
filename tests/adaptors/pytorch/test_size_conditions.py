"""Branches of a model's code on its input sizes: other paths are refused, harmless ones are not."""

import json
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.capture.graph_capture import capture_module
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES, from_plain, to_plain
from neural_mp.errors import DataError, NeuralMPError


class Branching(nn.Module):
    def __init__(self, rule):
        super().__init__()
        self.conv, self.rule = nn.Conv2d(3, 4, 3, padding=1), rule

    def forward(self, x):
        return self.rule(self.conv(x))


def of_remainder(x):
    return 2 * x if x.shape[2] % 2 == 0 else x + 100


def of_quotient(x):
    return 2 * x if x.shape[2] // 8 != 3 else x + 100


def of_product(x):
    return 2 * x if x.shape[2] * x.shape[3] > 600 else x + 100


def of_two_axes(x):
    return 2 * x if x.shape[2] > x.shape[3] else x + 100


def of_largest(x):
    return 2 * x if max(x.shape[2:]) - min(x.shape[2:]) < 5 or x.shape[2] % 4 else x + 100


def padded_to_multiple(x):
    rest = x.shape[2] % 4
    return F.pad(x, (0, 0, 0, 4 - rest)) if rest else x


def padded_where_odd(x):
    height = x.shape[2]
    return F.pad(x, (0, 0, 0, height % 2)) if height % 2 else x


def padded_as_same(x):
    height = x.shape[2]
    rows = max((-(-height // 2) - 1) * 2 + 3 - height, 0)
    return F.avg_pool2d(F.pad(x, (0, 0, 0, rows)) if rows > 0 else x, 3, 2)


def joined(x):
    up = F.interpolate(F.max_pool2d(x, 2), scale_factor=2.0)
    return torch.cat(
        [up, F.interpolate(x, scale_factor=2.0)[:, :, : up.shape[2], : up.shape[3]]], 1
    )


BRANCHING = (of_remainder, of_quotient, of_product, of_two_axes, of_largest, padded_to_multiple)
#: (rule, rows at capture): the captured path computes the same for any size.
ONE_PATH = ((padded_where_odd, 25), (padded_as_same, 24), (joined, 24), (joined, 25))
SIZES_TRIED = ((24, 24), (25, 24), (24, 25), (26, 24), (33, 20), (20, 33), (40, 40), (2, 24))


def outcomes(graph, net):
    """Return size → whether the graph ran; every run must agree with the model."""
    ran = dict.fromkeys(SIZES_TRIED, False)
    for size in SIZES_TRIED:
        x = torch.randn(3, 3, *size)
        with suppress(DataError):
            torch.testing.assert_close(graph(x), net(x), rtol=1e-4, atol=1e-4)
            ran[size] = True
    return ran


@pytest.mark.parametrize("rows", [24, 25])
@pytest.mark.parametrize("rule", BRANCHING, ids=lambda rule: rule.__name__)
@torch.no_grad()
def test_a_graph_runs_only_sizes_that_take_its_path(rule, rows):
    net = Branching(rule).eval()
    ran = outcomes(capture_module(net, CallArgs((torch.randn(2, 3, rows, 24),))), net)
    assert ran[rows, 24]
    assert not all(ran.values())


@pytest.mark.parametrize(("rule", "rows"), ONE_PATH)
@torch.no_grad()
def test_a_branch_to_equal_results_refuses_no_size(rule, rows):
    net = Branching(rule).eval()
    graph = capture_module(net, CallArgs((torch.randn(2, 3, rows, 24),)))
    ran = outcomes(graph, net)
    assert all(was_run for size, was_run in ran.items() if size[0] > 2)


@pytest.mark.slow
@torch.no_grad()
def test_a_saved_model_refuses_sizes_of_another_path(tmp_path):
    net = Branching(of_remainder).eval()
    x = torch.randn(2, 3, 24, 24)
    converter = MixedPrecision(model=net, precisions="int8", calib_dataloader=[x])
    converter.exit_policy = {"performance_only": True}
    result = converter()
    result.save(tmp_path)
    for model in (result, neural_mp.load(tmp_path)):
        assert model(torch.randn(1, 3, 30, 25)).shape == (1, 4, 30, 25)
        with pytest.raises(DataError, match=r"axis 2 of input 0 .* % 2\) == 0"):
            model(torch.randn(1, 3, 31, 25))


@torch.no_grad()
def test_conditions_survive_a_file():
    net = Branching(of_largest).eval()
    sizes = capture_module(net, CallArgs((torch.randn(2, 3, 25, 24),))).meta[SIZES]
    assert from_plain(json.loads(json.dumps(to_plain(sizes)))) == sizes
    assert any(axis.conditions for axis in sizes[0])


@pytest.mark.parametrize(
    "condition",
    [["%", "s0"], ["eval", "s0", 1], ["+"], [], [["+"], 1], ["+", 1.5], ["+", True], None, ["not"]],
)
def test_a_file_with_another_expression_is_refused(condition):
    with pytest.raises(NeuralMPError):
        from_plain([[["s0", 0, None, False, [condition]]]])


def test_a_deeply_nested_expression_is_refused():
    condition = "s0"
    for _ in range(100):
        condition = ["not", condition]
    with pytest.raises(NeuralMPError, match="operator"):
        from_plain([[["s0", 0, None, False, [condition]]]])
