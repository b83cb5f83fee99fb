"""Large batches run in parts exactly where samples do not depend on each other."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch
from machine import machine
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.kernels import batch_parts
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectGraph
from neural_mp.core.enums import Approach
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.errors import DataError
from neural_mp.testing import uniform


class Net(nn.Module):
    """A convolution, then a function of its result."""

    def __init__(self, then):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.LayerNorm(8)
        self.gate, self.head = nn.Conv2d(8, 8, 1), nn.Linear(8, 5)
        self.then = then

    def forward(self, x):
        return self.then(self, self.conv(x))


def _gated(net, x):
    return x * torch.sigmoid(net.gate(x.mean((2, 3), keepdim=True)))


def _scaled(net, x):
    return x * torch.arange(x.shape[0]).reshape(-1, 1, 1, 1)


#: Nets whose samples are independent of each other.
ALONE = {
    "residual": lambda net, x: net.gate(F.relu(x)) + x,
    "gate": _gated,
    "head": lambda net, x: net.head(x.mean((2, 3))),
    "flat": lambda net, x: F.max_pool2d(F.relu(x), 2).reshape(x.shape[0], -1),
    "flattened": lambda net, x: torch.flatten(x, 1),
    "channels last": lambda net, x: net.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2),
    "softmax": lambda net, x: torch.softmax(net.head(x.mean((-1, -2))), -1),
    "branches": lambda net, x: torch.cat([F.silu(x), F.hardswish(net.gate(x))], 1),
    "sequence": lambda net, x: net.head(x.flatten(2).transpose(1, 2)),
    "outputs": lambda net, x: {"mean": x.mean((2, 3)), "all": F.relu(x)},
    "upsampled": lambda net, x: F.interpolate(x, scale_factor=2.0, mode="nearest"),
    "selected": lambda net, x: x[:, 1] - x[:, :, 0].amax(1, keepdim=True),
}
#: Nets with samples that depend on others, or on the number of samples.
MIXED = {
    "mean of the batch": lambda net, x: x - x.mean(0, keepdim=True),
    "mean of all": lambda net, x: x - x.mean(),
    "softmax over samples": lambda net, x: torch.softmax(x.mean((2, 3)), 0),
    "similarities": lambda net, x: x.mean((2, 3)) @ x.mean((2, 3)).T,
    "size": lambda net, x: x / x.shape[0],
    "positions": _scaled,
    "first sample": lambda net, x: x - x[:1],
    "last first": lambda net, x: x.flip(0),
    "running sum": lambda net, x: x.cumsum(0),
    "folded": lambda net, x: x.reshape(-1, 2, 8, *x.shape[2:]).sum(1),
    "swapped": lambda net, x: x.mean((2, 3)).transpose(0, 1),
    "samples as channels": lambda net, x: x.permute(1, 0, 2, 3) - x.mean(1),
    "doubled": lambda net, x: torch.cat([x, x]),
    "one result for all": lambda net, x: (x, x.sum(0)),
}


def converted(then, precision=Precision.INT8, batch=6):
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(batch, 3, 8, 8)
    model = adaptor.load(Net(then).eval(), example=x)
    space = adaptor.space(model, machine())
    observations = adaptor.observe(model, [x], space)
    return adaptor.convert(model, space.resolve(uniform(space, precision)), observations, space), x


@pytest.fixture
def tiny_parts(monkeypatch):
    """Parts of two of the samples here."""
    monkeypatch.setattr(batch_parts, "MAX_PART_BYTES", 2 * 6144 // torch.get_num_threads())
    monkeypatch.setattr(batch_parts, "_measure_largest_op", lambda sample, module: 6144)


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.BF16])
@pytest.mark.parametrize("name", ALONE)
def test_parts_give_the_results_of_the_whole_batch(name, precision, tiny_parts):
    model, x = converted(ALONE[name], precision)
    direct = DirectGraph(model.runnable_graph)
    assert [len(part) for (part,) in direct._parts.split_leaves([x])] == [2, 2, 2]
    with torch.no_grad():
        expected, first, later = model.runnable_graph(x), direct(x), direct(x)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    if precision is Precision.INT8:  # float products depend on the place of their operands
        torch.testing.assert_close(later, first, atol=0, rtol=0)


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_depend_on_others_stay_together(name, tiny_parts):
    model, x = converted(MIXED[name])
    direct = DirectGraph(model.runnable_graph)
    assert not direct._parts.can_split([x])
    with torch.no_grad():
        assert torch.equal(
            *(torch.cat([leaf.flatten() for leaf in leaves]) for leaves in _both(direct, model, x))
        )


def _both(direct, model, x):
    for result in (direct(x), model.runnable_graph(x)):
        yield list(result) if isinstance(result, tuple) else [result]


def test_ranges_of_the_batch_keep_samples_together():
    """A dynamic range is that of all samples."""
    torch.manual_seed(0)
    adaptor, x = PyTorchAdaptor(), torch.randn(6, 16)
    model = adaptor.load(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)), example=x)
    space = adaptor.space(model, machine())
    dynamic = {
        op: next(
            (c for c in space.capabilities[op].configs if c.approach is Approach.DYNAMIC), FP32
        )
        for op in space.tunable_ops
    }
    plan = space.resolve(PrecisionPlan(dynamic))
    quantized = adaptor.convert(model, plan, adaptor.observe(model, [x], space), space)
    assert not DirectGraph(quantized.runnable_graph)._parts.is_splitting


def test_results_of_predict_and_of_the_module_are_the_same(tiny_parts):
    model, x = converted(ALONE["gate"])
    adaptor = PyTorchAdaptor()
    module = adaptor.native(model)
    results = [adaptor.predict(model, x), adaptor.predict(model, x), module(x), module(x)]
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_batch_of_wrong_size_is_refused_before_it_is_parted(tiny_parts):
    model, x = converted(ALONE["head"])
    with pytest.raises(DataError, match="axis 1 of input 0 has 2 values; expected 3"):
        PyTorchAdaptor().predict(model, x[:, :2])


def test_parts_hold_what_an_op_reads_and_writes(monkeypatch):
    model, x = converted(ALONE["residual"])
    parts = DirectGraph(model.runnable_graph)._parts
    # The sum, in place or not, of two results of 8 channels, as floats or bytes.
    least, most = 2 * x[0, 0].numel() * 8, 3 * 4 * x[0, 0].numel() * 8
    for limit, whole in ((least - 1, False), (6 * most, True)):
        monkeypatch.setattr(batch_parts, "MAX_PART_BYTES", limit / torch.get_num_threads())
        assert (len(parts.split_leaves([x])) == 1) is whole
    monkeypatch.setattr(batch_parts, "MAX_PART_BYTES", 1)
    assert [len(part) for (part,) in parts.split_leaves([x])] == [1] * 6


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries differ")
def test_freed_memory_stays_in_the_process():
    """Tensors of 24 MB one after another soon need no new pages.

    Where the system has put something behind the heap, glibc maps each anew: in few processes.
    """
    code = """
import resource, torch
from neural_mp.adaptors.pytorch.kernels.batch_parts import keep_freed_memory
keep_freed_memory()
faults = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(24_000_000, dtype=torch.uint8)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""
    keeps = []
    for _ in range(4):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        first, *_, last = map(int, done.stdout.split())
        assert first > 10
        keeps.append(last <= first / 10)
        if keeps[-1]:
            break
    assert any(keeps)
