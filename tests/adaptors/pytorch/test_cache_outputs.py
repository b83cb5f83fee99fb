"""Models of `transformers` return their caches, in their class, converted and reloaded."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree
from transformers import cache_utils
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutputWithPast

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.util.pytree import list_float_arrays

WIDTH, HEADS = 16, 2


class Cached(nn.Module):
    """One layer of keys and values, which a cache keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        keys, values = self.keys(x).reshape(shape), self.values(x).reshape(shape)
        return keys.transpose(1, 2), values.transpose(1, 2)

    def cache(self, x: torch.Tensor) -> object:
        cache = DynamicCache()
        cache.update(*self.split(x), 0)
        return cache

    def forward(self, x: torch.Tensor) -> BaseModelOutputWithPast:
        hidden = torch.relu(self.keys(x) + self.values(x))
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=self.cache(x))


class SlidingWindow(Cached):
    """A cache that counts the tokens it has seen, and keeps the last ones."""

    def cache(self, x: torch.Tensor) -> object:
        cache = DynamicCache()
        cache.layers.append(DynamicSlidingWindowLayer(sliding_window=4))
        cache.update(*self.split(x), 0)
        return cache


class TwoCaches(Cached):
    """A cache of caches."""

    def cache(self, x: torch.Tensor) -> object:
        return EncoderDecoderCache(super().cache(x), super().cache(x + 1))


class Recurrent(Cached):
    """A cache of states by number, without keys."""

    def cache(self, x: torch.Tensor) -> object:
        cache = DynamicCache()
        cache.layers.append(cache_utils.LinearAttentionLayer())
        cache.layers[0].update_recurrent_state(self.keys(x).sum(1))
        return cache


_NEEDS_LINEAR_ATTENTION = pytest.mark.skipif(
    not hasattr(cache_utils, "LinearAttentionLayer"), reason="a cache of newer transformers"
)


@pytest.fixture(
    params=[
        Cached,
        SlidingWindow,
        TwoCaches,
        pytest.param(Recurrent, marks=_NEEDS_LINEAR_ATTENTION),
    ],
    ids=lambda kind: kind.__name__,
)
def net(request):
    torch.manual_seed(0)
    return request.param().eval()


def tensors(cache):
    """Tensors of a cache, also in attributes of its layers."""
    if isinstance(cache, torch.Tensor):
        return [cache]
    if isinstance(cache, dict):
        return [tensor for value in cache.values() for tensor in tensors(value)]
    if isinstance(cache, list | tuple):
        return [tensor for value in cache for tensor in tensors(value)]
    if type(cache).__module__.startswith("transformers"):
        return tensors(vars(cache))
    return []


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_a_cache_is_returned_in_its_class(net, tmp_path):
    batches = [torch.randn(2, 6, WIDTH) for _ in range(3)]
    with torch.no_grad():
        expected = net(batches[0]).past_key_values
    converter = MixedPrecision(
        model=net,
        precisions="int8",
        objective="modelsize",
        calib_dataloader=[(batch, None) for batch in batches],
        workspace=tmp_path / "workspace",
    )
    result = converter()
    cache = result(batches[0]).past_key_values
    assert type(cache) is type(expected)
    assert repr(cache) == repr(expected)
    theirs, ours = tensors(expected), tensors(cache)
    assert [value.shape for value in ours] == [value.shape for value in theirs]
    for mine, reference in zip(ours, theirs, strict=True):
        noise, signal = (mine - reference).double().norm(), reference.double().norm()
        assert noise <= 0.1 * signal  # 20 dB
    result.save(tmp_path / "saved")
    loaded = neural_mp.load(tmp_path / "saved")
    values = tensors(loaded(batches[0])["past_key_values"])
    assert values
    for mine, reference in zip(values, ours, strict=True):
        np.testing.assert_array_equal(mine.numpy(), reference.numpy())


def test_a_cache_survives_being_taken_apart(net):
    from neural_mp.adaptors.pytorch.graph.output_classes import is_cache, register_caches

    with torch.no_grad():
        outputs = net(torch.randn(2, 6, WIDTH))
    register_caches(outputs)
    leaves, form = pytree.tree_flatten(outputs)
    assert not any(map(is_cache, leaves))
    built = pytree.tree_unflatten(leaves, form).past_key_values
    assert repr(built) == repr(outputs.past_key_values)
    for mine, reference in zip(tensors(built), tensors(outputs.past_key_values), strict=True):
        assert mine is reference
    assert pytree.tree_flatten(outputs)[1] == form


def test_tensors_of_a_cache_are_compared_with_those_of_fp32(net):
    outputs = net(torch.randn(2, 3, WIDTH))
    arrays = list_float_arrays(outputs)
    cached = [x for x in tensors(outputs.past_key_values) if x.is_floating_point()]
    expected = [outputs.last_hidden_state, *cached]
    assert len(arrays) == len(expected)
    for array, tensor in zip(arrays, expected, strict=True):
        np.testing.assert_array_equal(array, tensor.detach().numpy())
