"""Forms of models found in the wild, each of which once broke something."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import CaptureError, DataError, ModelLoadError
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8, BF16, FP16 = Precision.INT8, Precision.BF16, Precision.FP16


def conv(inputs, outputs, kernel=3, **options):
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, **options)


class Flattened(nn.Module):
    """A dense layer behind flattened channels-last memory."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = conv(2, 4), conv(4, 4), nn.Linear(4 * 64, 5)

    def forward(self, x):
        x = F.relu(self.b(F.relu(self.a(x))))
        return self.c(x.view(x.shape[0], -1))


class Patches(nn.Module):
    """Tokens from a convolution, as vision transformers make them."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Conv2d(2, 8, 2, 2), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.norm(tokens + F.gelu(self.mix(tokens)))


class SqueezeExcite(nn.Module):
    """An addition that broadcasts behind a convolution."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.e = conv(2, 4), conv(4, 4), conv(4, 3)
        self.c, self.d = conv(4, 4, 1), conv(4, 3, 1)

    def forward(self, x):
        y = F.relu(self.a(x))
        q = F.relu(self.c(y.mean((2, 3), keepdim=True)))
        return self.e(self.b(y) + q) + self.d(q)


class Weighted(nn.Module):
    """Additions with a factor."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = conv(2, 4), conv(4, 4), conv(4, 3), conv(4, 3)

    def forward(self, x):
        y = F.relu(self.a(x))
        return self.c(torch.add(self.b(y), y, alpha=2)) + self.d(torch.add(y, self.b(y), alpha=-3))


class Skips(nn.Module):
    """A small U-Net: pooling, a transposed convolution, concatenation."""

    def __init__(self):
        super().__init__()
        self.down, self.deep = conv(2, 4), conv(4, 8)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), conv(8, 3)

    def forward(self, x):
        first = F.relu(self.down(x))
        second = F.relu(self.deep(F.max_pool2d(first, 2)))
        return self.out(torch.cat([first, F.relu(self.up(second))], 1))


class Shared(nn.Module):
    """One layer used twice, and depthwise and grouped convolutions."""

    def __init__(self):
        super().__init__()
        self.a, self.b = conv(2, 4), conv(4, 4, groups=4)
        self.c = conv(4, 4, groups=2)

    def forward(self, x):
        x = F.hardswish(self.a(x))
        return {"twice": self.c(F.relu6(self.b(self.b(x)))), "once": F.silu(self.c(x))}


MODELS = [Flattened, Patches, SqueezeExcite, Weighted, Skips, Shared]


def leaves(result):
    return list(result.values()) if isinstance(result, dict) else [result]


@pytest.mark.parametrize("kind", MODELS)
def test_every_mix_is_near_fp32_and_survives_saving(kind, all_machine, tmp_path):
    torch.manual_seed(0)
    module, adaptor = kind().eval(), PyTorchAdaptor()
    x = torch.randn(6, 2, 8, 8).numpy()
    with torch.no_grad():
        reference = [y.numpy() for y in leaves(module(torch.from_numpy(x)))]
    model = adaptor.load(module, example=x)
    space = adaptor.space(model, all_machine)
    observed = adaptor.observe(model, [x], space)
    plans = [uniform(space, p) for p in (INT8, BF16, FP16)]
    for seed in range(3):
        random = np.random.default_rng(seed)
        choices = {op: space.capabilities[op].configs for op in space.tunable_ops}
        plans.append(
            PrecisionPlan({op: own[random.integers(len(own))] for op, own in choices.items()})
        )
    for index, plan in enumerate(plans):
        converted = adaptor.convert(model, space.resolve(plan), observed, space)
        results = leaves(adaptor.predict(converted, x))
        for expected, got in zip(reference, results, strict=True):
            assert got.dtype == expected.dtype
            assert signal_to_noise(expected, got) > 18, plan.to_dict()
        if index in (1, 2):  # all in 16 bits: the mixes hold the same ops
            continue
        folder = tmp_path / str(index)
        folder.mkdir()
        adaptor.save(converted, folder)
        restored = adaptor.restore(folder)
        assert restored.counts == converted.counts
        for got, again in zip(results, leaves(adaptor.predict(restored, x)), strict=True):
            np.testing.assert_allclose(again, got, atol=1e-5)
        assert len(leaves(adaptor.predict(restored, x[:1]))[0]) == 1


def load(module, example, **options):
    adaptor = PyTorchAdaptor()
    return adaptor, adaptor.load(module.eval(), example=example, **options)


def test_other_image_sizes_and_sequence_lengths_run():
    adaptor, model = load(nn.Sequential(conv(1, 3), nn.ReLU(), conv(3, 2)), np.ones((4, 1, 8, 8)))
    assert adaptor.predict(model, np.ones((2, 1, 12, 9))).shape == (2, 2, 12, 9)
    encoder = nn.Sequential(nn.Embedding(20, 6), nn.Linear(6, 3))
    adaptor, model = load(encoder, np.zeros((4, 7), np.int64))
    assert adaptor.predict(model, np.zeros((2, 11), np.int64)).shape == (2, 11, 3)


def test_a_batch_on_another_axis_is_kept_free():
    encoder = nn.TransformerEncoderLayer(16, 4, 32)  # [sequence, batch, features]
    adaptor, model = load(encoder, torch.randn(5, 8, 16).numpy())
    assert adaptor.predict(model, torch.randn(5, 3, 16).numpy()).shape == (5, 3, 16)


def test_a_size_the_model_fixes_is_named():
    adaptor, model = load(nn.Linear(4, 2), np.ones((3, 4)))
    with pytest.raises(DataError, match=r"float32\[2, 4\], got float32\[3, 5\]"):
        adaptor.predict(model, np.ones((3, 5)))


class FixedBatch(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.out = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(F.relu(self.layer(x)).reshape(3, 2, 6).sum(1))


def test_a_fixed_batch_size_is_said_and_survives_saving(all_machine, tmp_path):
    x = np.random.default_rng(0).random((6, 4))
    adaptor, model = load(FixedBatch(), x)
    assert any("the batch size is fixed to 6" in warning for warning in model.warnings)
    space = adaptor.space(model, all_machine)
    observed = adaptor.observe(model, [x], space)
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    adaptor.save(converted, tmp_path)
    restored = adaptor.restore(tmp_path)
    np.testing.assert_array_equal(adaptor.predict(restored, x), adaptor.predict(converted, x))


@pytest.mark.parametrize("view", [lambda a: a[:, :, ::-1], lambda a: a.transpose(0, 1, 3, 2)])
def test_strided_arrays_are_taken(view, net, digits):
    images = view(digits[1].images[:20])
    adaptor, model = load(net, images)
    with torch.no_grad():
        expected = net(torch.from_numpy(images.copy())).numpy()
    np.testing.assert_allclose(adaptor.predict(model, images), expected, atol=1e-4)


def test_tensors_of_another_framework_are_taken(net, digits):
    """As a tf.data.Dataset yields them: no numpy array, but able to become one."""

    class Foreign:
        def __init__(self, values):
            self.values = values

        def __array__(self, dtype=None, copy=None):
            return np.asarray(self.values, dtype)

    images = digits[1].images[:20]
    adaptor, model = load(net, Foreign(images))
    result = adaptor.predict(model, Foreign(images))
    assert isinstance(result, np.ndarray)
    np.testing.assert_array_equal(result, adaptor.predict(model, images))


class WritesToItsInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x.mul_(2).sub_(1))


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_the_users_data_never_change(kind):
    data = np.arange(12, dtype=np.float32).reshape(3, 4)
    batch = kind(data.copy())
    adaptor, model = load(WritesToItsInput(), batch)
    first = adaptor.predict(model, batch)
    second = adaptor.predict(model, batch)
    np.testing.assert_array_equal(np.asarray(batch), data)
    np.testing.assert_array_equal(np.asarray(first), np.asarray(second))


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x):
        self.calls += 1
        return self.layer(x) + self.calls


def test_a_buffer_the_model_updates_stays_fixed_and_is_said():
    module = Counts()
    adaptor, model = load(module, np.ones((3, 4)))
    calls = module.calls.clone()
    results = [adaptor.predict(model, np.ones((3, 4))) for _ in range(2)]
    np.testing.assert_array_equal(*results)
    assert torch.equal(module.calls, calls)
    assert any("'calls'" in warning for warning in model.warnings)


class Difference(nn.Module):
    def forward(self, left, right):
        return left - 10 * right


def test_inputs_go_where_their_names_say():
    left, right = np.full((2, 3), 5.0), np.ones((2, 3))
    for names, batch in (("left,right", (left, right)), ("right,left", (right, left))):
        adaptor, model = load(Difference(), batch, inputs=names)
        np.testing.assert_array_equal(adaptor.predict(model, batch), left - 10 * right)
    adaptor, model = load(Difference(), {"right": right, "left": left})
    np.testing.assert_array_equal(
        adaptor.predict(model, {"left": left, "right": right}), left - 10 * right
    )
    with pytest.raises(DataError, match="must hold 2 inputs .*, as named by inputs, got 1"):
        load(Difference(), (left,), inputs=["left", "right"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_dtypes_take_arrays(dtype):
    module = nn.Sequential(conv(1, 4), nn.ReLU(), conv(4, 2)).to(dtype).eval()
    x = np.random.default_rng(0).random((3, 1, 8, 8))
    adaptor, model = load(module, x)
    with torch.no_grad():
        expected = module(torch.from_numpy(x).to(dtype)).float().numpy()
    np.testing.assert_allclose(adaptor.predict(model, x), expected, atol=1e-2)


def test_data_that_do_not_fit_are_distinguished_from_models_that_cannot_be_captured(net):
    with pytest.raises(DataError, match=r"does not run on the inputs.*float32\[2, 3, 8, 8\]"):
        load(net, np.ones((2, 3, 8, 8)))
    with pytest.raises(DataError, match="None"):
        load(net, (None,))

    class Branches(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(CaptureError, match=r"Branches.*torch\.where"):
        load(Branches(), np.ones((2, 2)))


def test_what_was_converted_or_scripted_is_refused(net, all_machine, digits):
    images = digits[1].images[:8]
    adaptor, model = load(net, images)
    space = adaptor.space(model, all_machine)
    converted = adaptor.convert(
        model, space.resolve(uniform(space, BF16)), adaptor.observe(model, [], space), space
    )
    with pytest.raises(ModelLoadError, match="already converted"):
        adaptor.load(adaptor.native(converted), example=images)
    with pytest.raises(ModelLoadError, match="TorchScript"):
        adaptor.load(torch.jit.trace(net, torch.from_numpy(images)), example=images)


def test_the_sample_that_clips_ranges_sees_every_channel(all_machine):
    """Channel 1 is thirty times the rest; a sample in step with the channels would miss it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    with torch.no_grad():
        module[0].weight[1] *= 30
    x = torch.randn(8, 256, 8).numpy()
    adaptor, model = load(module, x)
    space = adaptor.space(model, all_machine)
    ranges = adaptor.observe(model, [x], space).ranges["1"]
    full = ranges["minmax"][1]
    assert ranges["mse"][1] > 0.5 * full
    assert ranges["percentile"][1] > 0.5 * full


def test_models_that_differ_in_an_option_of_an_op_or_a_constant_have_different_fingerprints():
    class Scaled(nn.Module):
        def __init__(self, slope, factor):
            super().__init__()
            self.slope, self.factor = slope, factor

        def forward(self, x):
            return nn.functional.leaky_relu(x, self.slope) * torch.tensor([1.0, self.factor])

    adaptor = PyTorchAdaptor()

    def fingerprint(*options):
        return adaptor.fingerprint(adaptor.load(Scaled(*options).eval(), inputs=torch.ones(3, 2)))

    assert fingerprint(0.1, 2.0) == fingerprint(0.1, 2.0)
    assert len({fingerprint(0.1, 2.0), fingerprint(0.2, 2.0), fingerprint(0.1, 3.0)}) == 3


def test_float64_tensors_are_converted_as_arrays_are(quick_runs):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    batch = torch.randn(8, 6, dtype=torch.float64)
    converter = MixedPrecision(precisions="int8", cache=False)
    converter.model, converter.calib_dataloader = net, [(batch, torch.zeros(8))]
    converter.exit_policy = ExitPolicy(performance_only=True)
    result = converter.fit()
    expected = result(batch.float())
    for _ in range(2):  # the second call takes the short way of a known layout
        torch.testing.assert_close(result(batch), expected)
    assert result(batch.numpy()).dtype == np.float32
    assert result(batch).dtype is torch.float32
