"""Programs compute what the ops of the graph do, one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from machine import machine
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph.graph_edit import copy_graph_shallowly
from neural_mp.adaptors.pytorch.kernels import programs
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS
from neural_mp.core.precision import Precision
from neural_mp.testing import uniform


class Residual(nn.Module):
    """Relu6, a pool, a sum of two branches, and sizes that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.deep = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.flat = nn.Conv2d(16, 16, 1)
        self.middle = nn.Conv2d(16, 16, 1)
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.max_pool2d(nn.functional.hardtanh(self.first(x), 0.0, 6.0), 2)
        x = x + self.flat(nn.functional.hardtanh(self.deep(x), 0.0, 6.0))
        x = nn.functional.hardtanh(self.middle(x), 0.0, 6.0)
        return self.last(x).reshape(x.shape[0], -1)


@pytest.fixture(scope="module")
def graph():
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(8, 3, 12, 12) * 3
    model = adaptor.load(Residual().eval(), example=x)
    space = adaptor.space(model, machine())
    observations = adaptor.observe(model, [x], space)
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor.convert(model, plan, observations, space).runnable_graph


@pytest.mark.parametrize("batch", [2, 5])
def test_the_result_is_that_of_the_ops_for_every_batch_size(graph, batch):
    x = torch.randn(batch, 3, 12, 12) * 3
    with torch.no_grad():
        expected, direct = graph(x), DirectGraph(graph)
        first, second = direct(x), direct(x)
    assert torch.equal(first, expected)
    assert torch.equal(second, expected)


def test_threads_get_the_same_results(graph):
    direct, x = DirectGraph(graph), torch.randn(2, 3, 12, 12)
    expected = direct(x)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: direct(x), range(200)))
    assert all(torch.equal(result, expected) for result in results)


def test_without_an_interpreter_the_result_is_the_same(graph, monkeypatch):
    x = torch.randn(2, 3, 12, 12)
    monkeypatch.setattr(programs, "_can_run_programs", lambda: False)
    with torch.no_grad():
        direct = DirectGraph(graph)
        assert torch.equal(direct(x), graph(x))
        assert torch.equal(direct(x), graph(x))


def test_ops_of_a_float_graph_keep_every_bit():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    x = torch.randn(3, 6)
    model = PyTorchAdaptor().load(net, example=x)
    with torch.no_grad():
        direct, expected = DirectGraph(model.runnable_graph), model.runnable_graph(x)
        assert torch.equal(direct(x), expected)
        assert torch.equal(direct(x), expected)


class Relative(nn.Module):
    """Ops that read a float and a comparison of sizes, as relative positions do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ratio = max(x.shape[0] / 4, 1.0)
        return ((x.abs() * ratio).exp().neg() + x.shape[0] / 3).relu() * ratio


@pytest.mark.parametrize("batch", [2, 8])
def test_floats_of_sizes_are_arguments(batch):
    model = PyTorchAdaptor().load(Relative().eval(), example=torch.randn(6, 5))
    x = torch.randn(batch, 5)
    with torch.no_grad():
        expected, direct = model.runnable_graph(x), DirectGraph(model.runnable_graph)
        assert torch.equal(direct(x), expected)
        assert torch.equal(direct(x), expected)
    torch.testing.assert_close(expected, Relative()(x))


def test_relu6_up_to_the_largest_integer_needs_no_kernel_of_its_own(graph):
    kernels = [node for node in graph.graph.nodes if node.target in INTEGER_CONVOLUTIONS]
    clipped = [node for node in kernels if node.args[13] is torch.uint8]
    assert len(clipped) == 3
    assert all(node.args[14] == "none" for node in clipped)


def test_most_convolutions_are_called_by_programs(graph):
    module = copy_graph_shallowly(graph)
    programs.call_programs(module)
    names = [str(getattr(node.target, "__name__", node.target)) for node in module.graph.nodes]
    assert "program_0" in names
    assert sum("qconv" in name for name in names) <= 1
