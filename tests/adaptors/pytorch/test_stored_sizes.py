"""Sizes that a model computes from others survive saving, whatever functions it uses."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.nn import functional as F

import neural_mp
from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.files.storage import with_storable_sizes
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import SIZES

ROUNDINGS = (math.ceil, math.floor, round, math.trunc)
RULES = {
    "math.ceil(h / 2)": lambda h: math.ceil(h / 2),
    "-(-h // 2)": lambda h: -(-h // 2),
    "int(h * 0.5)": lambda h: int(h * 0.5),
    "round(h / 2)": lambda h: round(h / 2),
    "round(h / 3)": lambda h: round(h / 3),
    "math.floor(h / 3)": lambda h: math.floor(h / 3),
    "math.ceil(h * 0.3)": lambda h: math.ceil(h * 0.3),
    "math.floor(h * 0.7)": lambda h: math.floor(h * 0.7),
    "round(h * 0.5)": lambda h: round(h * 0.5),
    "int(np.ceil(h / 2))": lambda h: int(np.ceil(h / 2)),
    "math.trunc(h / 3)": lambda h: math.trunc(h / 3),
    "abs(h - 9)": lambda h: abs(h - 9),
    "h % 4": lambda h: h % 4,
    "max(math.ceil(h / 2) * 2 - h, 0)": lambda h: max(math.ceil(h / 2) * 2 - h, 0),
    "min(h, 5)": lambda h: min(h, 5),
    "(h + 1) // 2 * 2": lambda h: (h + 1) // 2 * 2,
}


class Padded(nn.Module):
    """Pads by a size computed from that of the input."""

    def __init__(self, rule):
        super().__init__()
        self.layer, self.rule = nn.Linear(3, 2), rule

    def forward(self, x):
        return self.layer(F.pad(x, (0, 0, 0, self.rule(x.shape[1]))))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
def test_sizes_survive_saving(rule, tmp_path):
    module, adaptor = Padded(RULES[rule]).eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=(torch.randn(2, 12, 3),))
    adaptor.save(model, tmp_path)
    restored = adaptor.restore(tmp_path)
    for size in (7, 8, 11, 12, 13, 20, 21):
        x = torch.randn(3, size, 3)
        with torch.no_grad():
            expected = module(x)
        for form in (model, restored):
            try:
                got = form.module(x)
            except neural_mp.errors.DataError:
                continue  # a branch on the size bounds the sizes that the graph accepts
            torch.testing.assert_close(got, expected)
    torch.testing.assert_close(restored.module(torch.ones(2, 12, 3)), module(torch.ones(2, 12, 3)))


class ResizedPositions(nn.Module):
    """Positions that are resized to the length of the input, before ops whose arguments are read.

    The mode decides which of torch's composed ops does the resizing.
    """

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode, self.axes = mode, 1 if mode in ("linear", "nearest") else 2
        self.positions = nn.Parameter(torch.randn(1, 8, *[12] * self.axes))
        self.conv = (nn.Conv1d, nn.Conv2d)[self.axes - 1](8, 4, 3, padding=1)
        self.norm = (nn.BatchNorm1d, nn.BatchNorm2d)[self.axes - 1](8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = x.shape[-self.axes :]
        positions = F.interpolate(self.positions, size=sizes, mode=self.mode)
        return self.conv(torch.relu(self.norm(x + positions)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["linear", "nearest", "bilinear", "bicubic", "nearest-exact"])
def test_tensors_resized_to_the_input_survive_saving(mode, tmp_path):
    module, adaptor = ResizedPositions(mode).eval(), PyTorchAdaptor()
    model = adaptor.load(module, example=(torch.randn(2, 8, *[16] * module.axes),))
    adaptor.save(model, tmp_path)
    restored = adaptor.restore(tmp_path)
    for size in (16, 9):
        x = torch.randn(3, 8, *[size] * module.axes)
        with torch.no_grad():
            torch.testing.assert_close(restored.module(x), module(x))


@given(
    st.sampled_from([math.ceil, math.floor, round, abs]),
    st.one_of(
        st.floats(-1e6, 1e6, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-9),
        st.integers(-2000, 2000).map(lambda n: n / 2),
    ),
)
def test_the_forms_for_files_round_as_python_does(function, value):
    graph = Graph()
    graph.output(graph.call_function(function, (graph.placeholder("x"),)))
    module = GraphModule({}, graph)
    module.meta[SIZES] = (None,)
    stored = with_storable_sizes(module)
    assert Interpreter(stored).run(value) == function(value)
    assert not any(node.target is function for node in stored.graph.nodes)


@pytest.mark.slow
def test_a_file_for_torch_alone_holds_rounded_sizes(tmp_path):
    module = Padded(RULES["math.ceil(h / 2)"]).eval()
    converter = MixedPrecision(
        precisions="int8", cache=False, exit_policy=ExitPolicy(performance_only=True)
    )
    converter.workspace = tmp_path / "run"
    converter.model, converter.calib_dataloader = module, [torch.randn(4, 12, 3)]
    converter().save(tmp_path / "model.pt2")
    x = torch.randn(3, 21, 3)
    got = torch.export.load(tmp_path / "model.pt2").module()(x)
    assert got.shape == module(x).shape
