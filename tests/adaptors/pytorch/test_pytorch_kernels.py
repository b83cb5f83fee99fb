"""Our graphs of integer kernels against a numpy reference in integers."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from integers import convolve, integer_weight, integers, lowered, parameters
from machine import CONVOLUTION, DEPTHWISE, examples, machine
from ties import off_ties
from torch import nn
from torch.nn import functional as F

from neural_mp.adaptors.common.conversion import collect_observations
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.graph.kernel_ops import max_pool2d_uint8
from neural_mp.core.precision import Precision
from neural_mp.profiling import kernel_log
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8


def drawn(*shape, shift=0.0):
    """Numbers that float32 and float64 round to the same step."""
    values = (torch.randn(*shape) + shift).numpy()
    return off_ties(values, (max(values.max(), 0) - min(values.min(), 0)) / 255)


@settings(max_examples=examples(16), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (3, 8), (16, 16), (5, 7)]),
    st.sampled_from([1, 2, 3, 5]),
    st.sampled_from([1, 2]),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
    st.booleans(),
    st.sampled_from([None, nn.ReLU(), nn.ReLU6()]),
    st.booleans(),
)
def test_convolution_is_exact(
    seed, channels, kernel, stride, padding, dilation, grouped, activation, bias
):
    # What is made of padding alone stays in float, see below.
    assume(padding <= dilation * (kernel - 1))
    torch.manual_seed(seed)
    inputs, outputs = channels
    groups = inputs if grouped and inputs == outputs else 1
    conv = nn.Conv2d(
        inputs, outputs, kernel, stride, padding, dilation=dilation, groups=groups, bias=bias
    )
    module = nn.Sequential(conv, *([activation] if activation else [])).eval()
    x = drawn(2, inputs, 12, 11, shift=0.3)
    result, observed, _, space = lowered(module, x)

    scale, zero_point = parameters(observed, space.graph.inputs[0])
    weight, weight_scale = integer_weight(conv.weight, DEPTHWISE if groups > 1 else CONVOLUTION)
    # The padding is real zeros: the zero point, less itself.
    steps = integers(x, scale, zero_point) - zero_point
    total = convolve(steps, weight, stride, padding, dilation, groups)
    expected = total * scale * weight_scale.reshape(1, -1, 1, 1)
    if bias:
        expected = expected + conv.bias.detach().numpy().reshape(1, -1, 1, 1)
    if activation is not None:
        expected = np.clip(expected, 0, 6 if isinstance(activation, nn.ReLU6) else None)
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("kernel", "padding", "dilation", "runs"), [(2, 2, 1, False), (1, 1, 1, False), (2, 2, 2, True)]
)
def test_what_is_made_of_padding_alone_is_not_left_to_the_kernel(kernel, padding, dilation, runs):
    """It writes nothing there: of one channel, what was in memory comes out."""
    conv = nn.Conv2d(1, 16, kernel, padding=padding, dilation=dilation).eval()
    x = (torch.randn(2, 1, 12, 11) + 0.3).numpy()
    result, _, _, space = lowered(conv, x)
    (op,) = space.graph
    assert (INT8 in space.capabilities[op.name].precisions) == runs
    with torch.no_grad():
        exact = conv(torch.from_numpy(x)).numpy()
    assert np.abs(result - exact).max() < 0.05 * np.abs(exact).max()


@settings(max_examples=examples(12), deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(1, 1), (7, 5), (64, 10), (33, 128)]),
    st.sampled_from([(4,), (2, 3)]),
    st.sampled_from([None, nn.ReLU(), nn.GELU(), nn.GELU(approximate="tanh"), nn.Tanh()]),
)
def test_dense_layer_is_exact(seed, features, rows, activation):
    torch.manual_seed(seed)
    dense = nn.Linear(*features)
    module = nn.Sequential(dense, *([activation] if activation else [])).eval()
    x = drawn(*rows, features[0])
    result, observed, _, space = lowered(module, x)
    scale, zero_point = parameters(observed, space.graph.inputs[0])
    weight, weight_scale = integer_weight(dense.weight)
    total = (integers(x, scale, zero_point) - zero_point) @ weight.T
    expected = torch.from_numpy(total * scale * weight_scale) + dense.bias.detach()
    expected = activation(expected) if activation else expected
    expected = expected.detach().numpy()
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-3)


class Chain(nn.Module):
    """Two convolutions: what passes between them is uint8."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, x):
        return self.second(F.relu(self.first(x)))


def test_requantization_is_exact_to_one_step():
    torch.manual_seed(0)
    module = Chain().eval()
    x = torch.randn(2, 3, 9, 9).numpy()
    _, observed, converted, _ = lowered(module, x)
    kernel = next(n for n in converted.runnable_graph.graph.nodes if "qconv" in str(n.target))
    written = {}

    class Spy(torch.fx.Interpreter):
        def run_node(self, n):
            result = super().run_node(n)
            written[n] = result
            return result

    Spy(converted.runnable_graph).run(torch.from_numpy(x))
    assert written[kernel].dtype == torch.uint8

    scale, zero_point = parameters(observed, "x")
    weight, weight_scale = integer_weight(module.first.weight)
    steps = integers(x, scale, zero_point) - zero_point
    real = convolve(steps, weight, 1, 1, 1, 1) * scale * weight_scale.reshape(1, -1, 1, 1)
    real = np.maximum(real + module.first.bias.detach().numpy().reshape(1, -1, 1, 1), 0)
    out_scale, out_zero = parameters(observed, "relu")
    expected = np.clip(np.round(real / out_scale) + out_zero, 0, 255)
    assert np.abs(written[kernel].numpy().astype(int) - expected).max() <= 1


class Residuals(nn.Module):
    """Sums whose terms are still read elsewhere, before and after: overwriting one would show."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(7))

    def forward(self, x):
        a = F.relu(self.convs[0](x))
        b = F.relu(self.convs[1](a) + a)  # a is read again below
        c = F.relu(self.convs[2](b) + a)
        d = self.convs[3](c) + c  # the summand is the kernel's own input
        e = F.relu(self.convs[4](d) + F.max_pool2d(a, 3, 1, 1))
        f = F.relu(self.convs[5](e) + e.reshape(e.shape))  # the summand is a view
        return self.convs[6](f), e


def test_a_residual_sum_never_overwrites_what_is_read_later():
    """The kernel adds in place; the portable form, which does not, is the reference."""
    torch.manual_seed(1)
    module = Residuals().eval()
    x = torch.randn(2, 4, 8, 8).numpy()
    result, _, converted, space = lowered(module, x)
    sums = [n for n in converted.runnable_graph.graph.nodes if "pointwise.binary" in str(n.target)]
    assert len(sums) >= 3
    expected = converted.portable_graph(torch.from_numpy(x))
    for got, reference in zip(result, expected, strict=True):
        step = float(reference.detach().abs().max()) / 255
        assert np.abs(got - reference.detach().numpy()).max() <= 2 * step
    # And again: what one run leaves behind must not change the next.
    adaptor = PyTorchAdaptor()
    for got, again in zip(result, adaptor.predict(converted, x), strict=True):
        np.testing.assert_array_equal(got, again)
    assert len(space.tunable_ops) == 7


@settings(max_examples=examples(60))
@given(
    st.sampled_from([(1, 8), (16, 16)]),
    st.sampled_from(
        [([3, 3], [1, 1]), ([2], [0]), ([3, 2], [1, 0]), ([5, 5], [2, 2]), ([2], [1]), ([1], [0])]
    ),
    st.sampled_from([[], [1], [2, 2], [1, 3], [4, 7]]),
    st.sampled_from([[1], [2, 1]]),
    st.booleans(),
    st.sampled_from([torch.contiguous_format, torch.channels_last]),
)
def test_max_pooling_of_integers_is_exact(size, window, stride, dilation, ceil_mode, layout):
    kernel, padding = window
    torch.manual_seed(0)
    values = torch.randint(0, 256, (2, *size, 11), dtype=torch.uint8)
    pooled = max_pool2d_uint8(
        values.contiguous(memory_format=layout), kernel, stride, padding, dilation, ceil_mode
    )
    expected = F.max_pool2d(values.double(), kernel, stride, padding, dilation, ceil_mode)
    assert torch.equal(pooled.double(), expected)
    original = values[0].clone()
    single = max_pool2d_uint8(values[0], kernel, stride, padding, dilation, ceil_mode)
    assert torch.equal(single.double(), expected[0])
    assert torch.equal(values[0], original)


def test_a_dense_layer_adds_a_part_of_a_larger_tensor():
    """The kernel that adds minds no strides: a summand that is a view must be laid out anew."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.dense = nn.Linear(8, 8)

        def forward(self, x):
            return self.dense(x) + torch.cat([x, x], 1)[:, : x.shape[1]]

    inputs = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
    net = Part().eval()
    result, _, converted, _ = lowered(net, inputs)
    called = [str(node.target) for node in converted.runnable_graph.graph.nodes]
    assert "onednn.qlinear_pointwise.binary" in called
    with torch.no_grad():
        exact = net(inputs).numpy()
    assert signal_to_noise(exact, np.asarray(result)) > 30


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FP16])
@pytest.mark.parametrize(
    ("layers", "size"),
    [
        ((nn.Linear(48, 32), nn.Linear(32, 8)), (7, 48)),
        ((nn.Conv2d(16, 24, 3), nn.Conv2d(24, 8, 1)), (1, 16, 9, 9)),
    ],
)
def test_results_read_in_16_bits_take_no_reference_implementation(layers, size, precision):
    x = torch.randn(*size)
    net, adaptor = nn.Sequential(*layers).eval(), PyTorchAdaptor()
    model = adaptor.load(net, example=x)
    space = adaptor.space(model, machine(INT8, precision))
    first, _ = space.tunable_ops
    integers, floats = uniform(space, INT8), uniform(space, precision)
    plan = space.resolve(floats.replacing({first: integers[first]}))
    converted = adaptor.convert(
        model, plan, collect_observations(adaptor, model, [x], space), space
    )
    with kernel_log() as log:
        outputs = adaptor.predict(converted, x)
    of_integers = [call.implementation for call in log.calls if call.dtypes.get("src") == "u8"]
    assert of_integers
    assert not [name for name in of_integers if "ref" in name]
    assert signal_to_noise(net(x).detach().numpy(), outputs.float().numpy()) > 25
