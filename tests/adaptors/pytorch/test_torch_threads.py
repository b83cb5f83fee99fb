"""Traces of torch disturb neither those of other threads nor calls there, and leave no memory."""

import gc
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch import versions
from neural_mp.adaptors.pytorch.capture.graph_capture import capture_module
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs

X = torch.linspace(-1, 1, 8 * 64).reshape(8, 64)


def make_net():
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers).eval()


@pytest.fixture
def frequent_switches():
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("frequent_switches")
def test_modules_are_captured_in_several_threads():
    nets = [make_net() for _ in range(6)]
    error_output = sys.stderr
    with ThreadPoolExecutor(3) as pool:
        graphs = list(pool.map(lambda net: capture_module(net, CallArgs((X,))), nets))
    for net, graph in zip(nets, graphs, strict=True):
        torch.testing.assert_close(graph(X), net(X))
    assert sys.stderr is error_output


class Calling(nn.Module):
    """Runs a function in another thread, in the middle of a forward pass."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(self.function).result()
        return x + 1


def test_a_converted_model_runs_while_another_thread_exports():
    """During an export, torch replaces functions of its interpreter in every thread."""
    converter = MixedPrecision(model=make_net(), precisions="int8", calib_dataloader=[X])
    converter.objective, converter.runtime = "modelsize", "source"
    model = converter()
    expected, outputs = model(X), []
    torch.export.export(Calling(lambda: outputs.append(model(X))), (X,), strict=False)
    assert outputs
    for output in outputs:
        torch.testing.assert_close(output, expected, rtol=0, atol=0)


def count_traces():
    gc.collect()
    return sum(type(item) is ShapeEnv for item in gc.get_objects())


def test_a_trace_goes_with_its_model():
    """Torch alone keeps all sizes of every export."""
    counts = []
    for _ in range(3):
        converter = MixedPrecision(model=make_net(), precisions="int8", calib_dataloader=[X])
        converter.objective, converter.runtime = "modelsize", "source"
        converter()
        del converter
        counts.append(count_traces())
    assert max(counts[1:]) <= counts[0]


def test_sources_of_generated_graphs_stay_within_a_limit(monkeypatch):
    """Torch keeps the source of every graph for the process; tracebacks show the newest."""
    monkeypatch.setattr(versions, "MAX_GENERATED_SOURCE_BYTES", 20_000)
    names = set()
    for _ in range(3):
        converter = MixedPrecision(model=make_net(), precisions="int8", calib_dataloader=[X])
        converter.objective, converter.runtime = "modelsize", "source"
        converter()
        names |= {name for name in linecache.cache if name.startswith("<eval_with_key>")}
    graph = torch.export.export(make_net(), (X,)).module()
    versions.release_trace(torch.export.export(make_net(), (X,)))
    sources = {name: linecache.getlines(name) for name in names}
    assert sum(len("".join(lines)) for lines in sources.values()) <= 20_000
    assert linecache.getlines(type(graph).forward.__code__.co_filename)
