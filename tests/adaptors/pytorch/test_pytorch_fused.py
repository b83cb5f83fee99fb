"""What integer kernels take in with them, and what moves integers, against numpy integers."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from integers import MACHINE, convolve, integer_weight, integers, lowered, parameters
from machine import CONVOLUTION, DEPTHWISE, examples
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph import kernel_ops as kernels
from neural_mp.adaptors.pytorch.versions import find_integer_convolution
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.testing import uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8
#: The name of the integer kernel of the convolutions here.
CONVOLVED = str(find_integer_convolution(2))


def written(converted, x):
    """Graph node name of the runnable form → what it computes for `x`."""
    values = {}

    class Spy(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            # What a node writes may be overwritten in place later.
            values[n] = result.clone() if isinstance(result, torch.Tensor) else result
            return result

    with torch.no_grad():
        Spy(converted.runnable_graph).run(torch.from_numpy(x))
    return values


def kernel_results(converted, x, name):
    return [value for node, value in written(converted, x).items() if name in str(node.target)]


def requantized(real, observed, tensor):
    scale, zero_point = parameters(observed, tensor)
    return np.clip(np.round(real / scale) + zero_point, 0, 255), scale, zero_point


class Sum(nn.Module):
    """A residual block whose three tensors are all uint8: `relu(b(a(x)) + a(x))`, then a reader."""

    def __init__(self, channels, kernel, stride, padding, groups, activated):
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 1)
        self.b = nn.Conv2d(channels, channels, kernel, stride, padding, groups=groups)
        self.skip = nn.MaxPool2d(1, stride)
        self.reader = nn.Conv2d(channels, 3, 1)
        self.activated = activated

    def forward(self, x):
        first = self.a(x)
        total = self.b(first) + self.skip(first)
        return self.reader(F.relu(total) if self.activated else total)


@settings(max_examples=examples(12))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([1, 4, 16, 24]),
    st.sampled_from([(1, 0), (3, 1), (5, 2)]),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.booleans(),
)
def test_a_residual_sum_in_integers_is_exact_to_one_step(
    seed, channels, window, stride, depthwise, activated
):
    torch.manual_seed(seed)
    kernel, padding = window
    groups = channels if depthwise else 1
    module = Sum(channels, kernel, stride, padding, groups, activated).eval()
    x = torch.randn(2, channels, 9, 8).numpy()
    _, observed, converted, _ = lowered(module, x)
    (result,) = kernel_results(converted, x, "pointwise.binary")
    assert result.dtype == torch.uint8
    # The term that is added and the kernel's input, as the kernel sees them.
    codes = kernel_results(converted, x, CONVOLVED)[0].numpy().astype(np.int64)
    scale, zero_point = parameters(observed, "a")
    weight, weight_scale = integer_weight(module.b.weight, DEPTHWISE if groups > 1 else CONVOLUTION)
    total = convolve(codes - zero_point, weight, stride, padding, 1, groups)
    real = total * scale * weight_scale.reshape(1, -1, 1, 1)
    real += module.b.bias.detach().numpy().reshape(1, -1, 1, 1)
    real += (codes[:, :, ::stride, ::stride] - zero_point) * scale
    if activated:
        real = np.maximum(real, 0)
    expected, _, _ = requantized(real, observed, "relu" if activated else "add")
    assert np.abs(result.numpy().astype(int) - expected).max() <= 1


class FloatSum(nn.Module):
    """The same with nothing behind that reads uint8: the kernel sums in float32."""

    def __init__(self, channels):
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, channels, 1), nn.Conv2d(channels, channels, 3, 1, 1)

    def forward(self, x):
        first = self.a(x)
        return F.relu(self.b(first) + first).mean((2, 3))


@pytest.mark.parametrize("channels", [1, 3, 16])
def test_a_residual_sum_in_float_is_exact(channels):
    torch.manual_seed(0)
    module = FloatSum(channels).eval()
    x = torch.randn(2, channels, 7, 9).numpy()
    result, observed, converted, _ = lowered(module, x)
    assert len(kernel_results(converted, x, "pointwise.binary")) == 1
    codes = kernel_results(converted, x, CONVOLVED)[0].numpy().astype(np.int64)
    scale, zero_point = parameters(observed, "a")
    weight, weight_scale = integer_weight(module.b.weight)
    real = convolve(codes - zero_point, weight, 1, 1, 1, 1) * scale
    real = real * weight_scale.reshape(1, -1, 1, 1)
    real += module.b.bias.detach().numpy().reshape(1, -1, 1, 1)
    real = np.maximum(real + (codes - zero_point) * scale, 0)
    np.testing.assert_allclose(result, real.mean((2, 3)), rtol=1e-4, atol=1e-4)


class DenseSum(nn.Module):
    def __init__(self, inputs, outputs, activated, read, turned):
        super().__init__()
        self.dense, self.reader = nn.Linear(inputs, outputs), nn.Linear(outputs, 4)
        self.activated, self.read, self.turned = activated, read, turned

    def forward(self, x, addend):
        if self.turned:
            addend = addend.transpose(0, 1)
        total = self.dense(x) + torch.exp(addend)  # a float term
        total = F.relu(total) if self.activated else total
        return self.reader(total) if self.read else total * 2


@settings(max_examples=examples(12))
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 3), (8, 5), (64, 33), (17, 64)]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_dense_layer_adds_a_float_term(seed, features, activated, read, turned):
    torch.manual_seed(seed)
    inputs, outputs = features
    module = DenseSum(inputs, outputs, activated, read, turned).eval()
    x = torch.randn(6, inputs)
    addend = torch.randn(outputs, 6) if turned else torch.randn(6, outputs)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=(x, addend))
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [(x, addend)], space)
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    results = {}

    class Spy(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            if n.target is torch.ops.onednn.qlinear_pointwise.binary:
                results["sum"] = result
            return result

    with torch.no_grad():
        Spy(converted.runnable_graph).run(x, addend)
    scale, zero_point = parameters(observed, "x")
    steps = x.numpy() / scale
    assume(np.abs(steps - np.floor(steps) - 0.5).min() > 1e-4)  # ties are rounded either way
    weight, weight_scale = integer_weight(module.dense.weight)
    real = (integers(x.numpy(), scale, zero_point) - zero_point) @ weight.T * scale * weight_scale
    term = (addend.T if turned else addend).exp().numpy()
    real = real + module.dense.bias.detach().numpy() + term
    real = np.maximum(real, 0) if activated else real
    if read:
        expected, _, _ = requantized(real, observed, "relu" if activated else "add")
        assert results["sum"].dtype == torch.uint8
        assert np.abs(results["sum"].numpy().astype(int) - expected).max() <= 1
    else:
        np.testing.assert_allclose(results["sum"].numpy(), real, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("axes", "activation"), [(1, nn.ReLU()), (1, None), (3, nn.ReLU())])
def test_convolutions_over_lines_and_volumes(axes, activation):
    torch.manual_seed(0)
    kind = {1: nn.Conv1d, 3: nn.Conv3d}[axes]
    convolution = kind(4, 6, 3, 2, 1, groups=2)
    module = nn.Sequential(convolution, *([activation] if activation else [])).eval()
    x = torch.randn(2, 4, *[8] * axes).numpy()
    result, observed, converted, space = lowered(module, x)
    assert len(kernel_results(converted, x, CONVOLVED)) == 1
    scale, zero_point = parameters(observed, space.graph.inputs[0])
    weight, weight_scale = integer_weight(convolution.weight)
    steps = torch.from_numpy(integers(x, scale, zero_point) - zero_point).double()
    apply = {1: F.conv1d, 3: F.conv3d}[axes]
    total = apply(steps, torch.from_numpy(weight).double(), None, 2, 1, 1, 2).numpy()
    column = (1, -1, *[1] * axes)
    expected = total * scale * weight_scale.reshape(column)
    expected = expected + convolution.bias.detach().numpy().reshape(column)
    expected = np.maximum(expected, 0) if activation else expected
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.reader = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 2, 3)

    def forward(self, x):
        return self.reader(F.pad(torch.cat([self.a(x), F.relu(self.b(x))], 1), (0, 1, 2, 0)))


def test_what_is_joined_and_padded_stays_in_integers_with_one_scale():
    torch.manual_seed(0)
    module = Padded().eval()
    x = torch.randn(2, 3, 6, 6).numpy()
    result, observed, converted, _ = lowered(module, x)
    counts = converted.counts
    assert (counts.quantize, counts.dequantize) == (1, 0)
    scale, zero_point = parameters(observed, "cat")
    source_scale, source_zero = parameters(observed, "x")
    steps = integers(x, source_scale, source_zero) - source_zero

    def through(conv):
        weight, weight_scale = integer_weight(conv.weight)
        real = convolve(steps, weight, 1, 0, 1, 1) * source_scale
        real = real * weight_scale.reshape(1, -1, 1, 1)
        return real + conv.bias.detach().numpy().reshape(1, -1, 1, 1)

    real = np.concatenate([through(module.a), np.maximum(through(module.b), 0)], 1)
    expected = np.clip(np.round(real / scale) + zero_point, 0, 255)
    padded = np.pad(expected, ((0, 0), (0, 0), (2, 0), (0, 1)), constant_values=zero_point)
    (moved,) = kernel_results(converted, x, "constant_pad_nd")
    assert moved.dtype == torch.uint8
    assert np.abs(moved.numpy().astype(int) - padded).max() <= 1
    with torch.no_grad():
        reference = module(torch.from_numpy(x)).numpy()
    assert np.abs(result - reference).max() < 0.05 * np.abs(reference).max()


def test_joined_tensors_fall_back_together():
    adaptor = PyTorchAdaptor()
    model = adaptor.load(Padded().eval(), example=torch.randn(2, 3, 6, 6).numpy())
    space = adaptor.space(model, MACHINE)
    assert frozenset({"a", "b", "reader"}) in space.tied_ops


@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (40,)])
@pytest.mark.parametrize("features", [(64, 10), (7, 5), (96, 33)])
def test_dynamic_ranges_are_those_of_the_values_at_hand(rows, features):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(*features), nn.ReLU()).eval()
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=torch.ones(4, *rows[1:], features[0]).numpy())
    space = adaptor.space(model, MACHINE).with_int8(["dynamic"])
    observed = adaptor.observe(model, [], space)  # nothing was seen before
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    weight, weight_scale = integer_weight(module[0].weight)
    for factor in (0.01, 1.0, 300.0):
        x = torch.randn(*rows, features[0]) * factor
        x[0] *= 50  # a row of outliers, as a first token
        x = x.numpy()
        low, high = (np.clip(end, *side) for end, side in (
            (x.min(-1, keepdims=True), (None, 0)), (x.max(-1, keepdims=True), (0, None))
        ))  # fmt: skip
        scale = (high - low) / 255
        zero_point = np.round(-low / scale)
        steps = np.clip(np.round(x / scale + zero_point), 0, 255) - zero_point
        expected = steps @ weight.T * scale * weight_scale + module[0].bias.detach().numpy()
        result = adaptor.predict(converted, x)
        step = scale * weight_scale.max() * max(np.abs(weight).max(), 255)
        error = np.abs(result - np.maximum(expected, 0))
        assert (error <= 1.01 * step + 1e-3 * np.abs(expected)).all()
        # Other rows in the batch change nothing.
        np.testing.assert_array_equal(adaptor.predict(converted, x[-1:])[0], result[-1])


@pytest.mark.parametrize("rows", [(1,), (16,), (17,), (2, 3), (0,)])
@pytest.mark.parametrize("features", [(64, 10), (7, 5), (96, 33)])
def test_weights_alone_in_integers(rows, features):
    torch.manual_seed(0)
    module = nn.Linear(*features).eval()
    x = torch.randn(*rows, features[0])
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=torch.ones(4, *rows[1:], features[0]))
    space = adaptor.space(model, MACHINE).with_int8(["weight_only"])
    converted = adaptor.convert(
        model, space.resolve(uniform(space, INT8)), adaptor.observe(model, [], space), space
    )
    weight, weight_scale = integer_weight(module.weight, limit=127)
    expected = x.double().numpy() @ (weight.T * weight_scale) + module.bias.detach().numpy()
    result = adaptor.predict(converted, x).detach().numpy()
    assert result.shape == expected.shape
    # A few rows are rounded to bfloat16 on the way: 8 bits of mantissa.
    largest = np.abs(expected).max(initial=1.0)
    np.testing.assert_allclose(result, expected, rtol=0.02, atol=0.02 * largest)


def test_a_table_of_embeddings_is_stored_in_integers():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 3)).eval()
    ids = torch.randint(0, 50, (4, 7))
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=ids)
    space = adaptor.space(model, MACHINE)
    table, scale = integer_weight(module[0].weight, limit=127)
    plan = PrecisionPlan({"0": space.capabilities["0"].config(INT8)})
    converted = adaptor.convert(
        model, space.resolve(plan), adaptor.observe(model, [], space), space
    )
    vectors = table[ids.numpy()] * scale[ids.numpy()][..., None]
    expected = module[1](torch.from_numpy(vectors).float()).detach().numpy()
    np.testing.assert_allclose(
        adaptor.predict(converted, ids).detach().numpy(), expected, rtol=1e-4, atol=1e-5
    )


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(40, 32), nn.Linear(32, 40, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words):
        return self.head(torch.tanh(self.words(words)))


def test_tied_weights_are_stored_once():
    torch.manual_seed(0)
    module, ids = Tied().eval(), torch.randint(0, 40, (4, 5))
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=ids)
    space = adaptor.space(model, MACHINE)
    converted = adaptor.convert(
        model, space.resolve(uniform(space, INT8)), adaptor.observe(model, [ids], space), space
    )
    assert adaptor.weight_bytes(model) == 40 * 32 * 4
    assert adaptor.weight_bytes(converted) == 40 * 32 + 40 * 4


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_conversions_agree_with_numpy(layout):
    torch.manual_seed(0)
    x = (torch.randn(2, 3, 5, 4) * 3).contiguous(memory_format=layout)
    scale, zero_point = 0.03, 117
    q = kernels.quantize_uint8(x, torch.tensor(zero_point + 0.5), 1 / scale)
    expected = integers(x.numpy(), scale, zero_point)
    assert np.abs(q.numpy().astype(int) - expected).max() <= 1
    assert (q.numpy() == expected).mean() > 0.99
    back = kernels.dequantize_uint8(q, scale, torch.tensor(float(zero_point)), torch.float32)
    np.testing.assert_allclose(
        back.numpy(), (q.numpy().astype(int) - zero_point) * scale, rtol=1e-6
    )
    assert back[q == zero_point].abs().max() == 0
