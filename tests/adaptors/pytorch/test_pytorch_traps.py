"""Models that look harmless and once came out wrong, or crashed, or were changed."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from integers import MACHINE
from machine import machine
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.quant_params import compute_affine_parameters
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, DataError
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16, FP16 = Precision.INT8, Precision.BF16, Precision.FP16

ALL = machine(BF16, FP16)


def all_int8(module, inputs, capture="whole"):
    """Everything that can in INT8, and what the module itself computes."""
    adaptor, module = PyTorchAdaptor(), module.eval()
    copies = pytree.tree_map(torch.clone, inputs)
    with torch.no_grad():
        expected = module(*copies) if isinstance(copies, tuple) else module(copies)
    model = adaptor.load(module, example=inputs, capture=capture)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [inputs], space)
    return (
        adaptor,
        adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space),
        expected,
    )


def assert_near(got, expected, decibels=25):
    for mine, theirs in zip(pytree.tree_leaves(got), pytree.tree_leaves(expected), strict=True):
        assert mine.shape == theirs.shape
        assert signal_to_noise(theirs.numpy(), mine.numpy()) > decibels


class OneOrMany(nn.Module):
    def __init__(self, at_least):
        super().__init__()
        self.layer, self.at_least = nn.Linear(8, 8), at_least

    def forward(self, x):
        return self.layer(x) if x.shape[0] > self.at_least else self.layer(x) * 100


def test_sizes_that_take_another_branch_are_refused_by_the_converted_model_too(tmp_path):
    adaptor, converted, _ = all_int8(OneOrMany(2), torch.randn(4, 8))
    adaptor.save(converted, tmp_path)
    for model in (converted, adaptor.restore(tmp_path)):
        assert len(adaptor.predict(model, torch.randn(7, 8))) == 7
        with pytest.raises(DataError, match="at least 3"):
            adaptor.predict(model, torch.randn(2, 8))


def test_a_batch_of_one_that_is_another_case_is_said():
    model = PyTorchAdaptor().load(OneOrMany(1).eval(), example=torch.randn(4, 8))
    assert any("batch of one" in warning for warning in model.warnings)


class SameNames(nn.Module):
    """An input and a module of one name; a numbered name that a module has already."""

    def __init__(self):
        super().__init__()
        self.image, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3)
        self.relu_2 = nn.ReLU()

    def forward(self, image):
        x = F.relu(self.image(image / 255 * 2 - 1))
        return self.head(self.relu_2(F.relu(x * 1000) - 0.5) / 1000)


def test_equal_names_are_made_unique():
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8) * 255
    adaptor, converted, expected = all_int8(SameNames(), x)
    assert_near(adaptor.predict(converted, x), expected)
    names = [op.name for op in adaptor.graph(converted)]
    assert len(names) == len(set(names))
    assert {"image", "head", "relu_2", "relu", "relu_3"} <= set(names)


class Strided(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x):
        y = self.a(x)
        b, c, h, w = y.shape
        magnitudes = torch.view_as_complex(y.reshape(b, c, h, w // 2, 2)).abs()
        y = torch.as_strided(y, (b, c, h // 2, w), (c * h * w, h * w, 2 * w, 1))
        return self.b(y), magnitudes


def test_what_reads_memory_in_order_gets_it_in_order():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    adaptor, converted, expected = all_int8(Strided(), x)
    assert_near(adaptor.predict(converted, x), expected)


@pytest.mark.parametrize("size", [1e-9, 1e-20, 1.0, 1e9])
def test_values_of_any_size_are_quantized(size):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        module[0].weight *= size
        module[1].weight /= size
    x = torch.randn(16, 8)
    adaptor, converted, expected = all_int8(module, x)
    assert_near(adaptor.predict(converted, x), expected)


@settings(max_examples=50)
@given(st.floats(-1e30, 1e30), st.floats(-1e30, 1e30))
def test_scale_and_zero_point_hold_the_range(first, second):
    low, high = sorted((first, second))
    scale, zero_point = compute_affine_parameters(low, high)
    assert 0 <= zero_point <= 255
    assert np.isfinite(np.float32(1 / scale))
    step = 1.01 * scale
    assert (0 - zero_point) * scale <= min(low, 0) + step
    assert (255 - zero_point) * scale >= max(high, 0) - step


@pytest.mark.parametrize("kind", [nn.Conv1d, nn.Conv2d, nn.Conv3d])
@pytest.mark.parametrize(
    "activation", [nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardswish(), nn.GELU(), nn.Tanh()]
)
def test_every_activation_behind_every_convolution_runs(kind, activation):
    torch.manual_seed(0)
    axes = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}[kind]
    x = torch.randn(2, 3, *[6] * axes)
    adaptor, converted, expected = all_int8(nn.Sequential(kind(3, 4, 3), activation), x)
    assert_near(adaptor.predict(converted, x), expected)


class TimeFirst(nn.Module):
    """The first axis is time, and there has to be enough of it."""

    def __init__(self):
        super().__init__()
        self.conv, self.dense = nn.Conv1d(6, 6, 5), nn.Linear(6, 6)

    def forward(self, x):
        return self.dense(self.conv(x.permute(1, 2, 0)).permute(2, 0, 1))


def test_a_first_axis_that_cannot_be_cut_to_two_is_left():
    x = torch.randn(12, 2, 6)
    adaptor, converted, expected = all_int8(TimeFirst(), x)
    assert_near(adaptor.predict(converted, x), expected)


class Step(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.layer = nn.Linear(1, 8), nn.Linear(4, 8)

    def forward(self, x, t):
        return self.time(t.reshape(1, 1)) + self.layer(x)


def test_a_single_number_may_be_quantized():
    torch.manual_seed(0)
    inputs = (torch.randn(3, 4), torch.tensor(0.5))
    adaptor, converted, expected = all_int8(Step(), inputs)
    assert_near(adaptor.predict(converted, inputs), expected)


class Walks(nn.Module):
    """Its own code does more with its modules than to call them, and branches on values."""

    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.rest = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.never = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, words):
        self.calls += 1
        x = self.first(self.words(words))
        for layer in self.rest:
            x = layer(x) * 1.5
        if x.sum() > 1e9:
            x = self.never(x)
        return F.linear(x, self.words.weight)


def test_modules_that_are_more_than_called_are_taken_apart_further():
    torch.manual_seed(0)
    module, ids = Walks(), torch.randint(0, 20, (4, 5))
    module.cached = module.first(torch.ones(1, 8))  # a tensor with a history, left by a training
    adaptor, converted, expected = all_int8(module, ids, capture="modules")
    assert set(converted.parts) == {"first", "rest.0", "rest.2"}
    assert_near(adaptor.predict(converted, ids), expected)
    assert module.calls == 1  # the user's own, from the test's own call
    module.train()
    assert_near(adaptor.predict(converted, ids), expected)
    with torch.no_grad():
        assert_near(adaptor.native(converted)(ids), expected)


class Changes(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8, max_norm=1.0)
        self.layer = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, words):
        self.seen += 1
        return self.layer(self.words(words))


def test_loading_changes_neither_buffers_nor_weights():
    module = Changes().eval()
    original = {name: value.clone() for name, value in module.state_dict().items()}
    PyTorchAdaptor().load(module, example=torch.randint(0, 20, (4, 5)))
    assert all(torch.equal(value, original[name]) for name, value in module.state_dict().items())


class ScalesInPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        x.mul_(2)
        return self.layer(x) if x.sum() < 1e9 else x


def test_module_by_module_the_users_data_stay_as_they_are():
    x = torch.randn(3, 4)
    original = x.clone()
    adaptor, converted, expected = all_int8(ScalesInPlace(), x, capture="modules")
    assert_near(adaptor.predict(converted, x), expected)
    assert torch.equal(x, original)


class Copies(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x.clone(), self.offset.clone()


def test_outputs_are_memory_of_their_own():
    module, x = Copies().eval(), torch.ones(2, 3)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=x)
    for output in adaptor.predict(model, x):
        output.zero_()
    assert x.min() == module.offset.min() == 1


class PartlyHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3).bfloat16()

    def forward(self, x):
        return self.b(self.a(x).bfloat16()).float()


def test_layers_in_bfloat16_among_others_are_converted_and_saved(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    adaptor, converted, expected = all_int8(PartlyHalf(), x)
    assert_near(adaptor.predict(converted, x), expected)
    adaptor.save(converted, tmp_path)
    assert_near(adaptor.predict(adaptor.restore(tmp_path), x), expected)


class Speaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x), "done"


def test_a_text_among_the_outputs_is_named_when_saving(tmp_path):
    adaptor = PyTorchAdaptor()
    model = adaptor.load(Speaks().eval(), example=torch.randn(3, 4))
    space = adaptor.space(model, MACHINE)
    converted = adaptor.convert(
        model, space.resolve(space.fp32_plan()), adaptor.observe(model, [], space), space
    )
    with pytest.raises(ConversionError, match="the text 'done'"):
        adaptor.save(converted, tmp_path)


class AddsToActivated(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.layer, self.activation = nn.Linear(16, 16), activation

    def forward(self, x):
        return self.activation(self.layer(x)) + x


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize("activation", [nn.ReLU(), nn.GELU()])
def test_what_the_compiler_fails_to_fuse_is_kept_from_it(activation):
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    adaptor, converted, expected = all_int8(AddsToActivated(activation), x)
    assert_near(adaptor.compiler.compile(converted)(x), expected)


@pytest.mark.parametrize("precision", [BF16, FP16])
def test_int8_behind_16_bits_is_valid_onnx(precision, tmp_path):
    onnx = pytest.importorskip("onnx")
    module = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).eval()
    x = torch.randn(4, 8)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=x)
    space = adaptor.space(model, ALL)
    plan = PrecisionPlan(
        {"0": space.capabilities["0"].config(precision), "2": space.capabilities["2"].config(INT8)}
    )
    converted = adaptor.convert(
        model, space.resolve(plan), adaptor.observe(model, [x], space), space
    )
    adaptor.export_onnx(converted, tmp_path / "model.onnx", {})
    onnx.checker.check_model(onnx.load(tmp_path / "model.onnx"), full_check=True)


class ComputedBias(nn.Module):
    """A batch norm behind a convolution whose bias is computed."""

    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.bias = nn.Linear(4, 8)

    def forward(self, x, y):
        bias = self.bias(y).mean(0)
        return self.norm(F.conv2d(x, self.layer.weight, bias))


def test_a_bias_that_is_computed_is_not_lost_in_a_batch_norm():
    torch.manual_seed(0)
    inputs = torch.randn(4, 3, 8, 8), torch.randn(4, 4) + 5
    adaptor, converted, expected = all_int8(ComputedBias(), inputs)
    assert_near(adaptor.predict(converted, inputs), expected)
