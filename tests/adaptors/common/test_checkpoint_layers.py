"""Integer layers read from checkpoints: the reverse of writing them."""

from __future__ import annotations

import numpy as np
import pytest

from neural_mp.adaptors.common.weights.checkpoint_formats import (
    FORMATS,
    CheckpointFormat,
    IntegerLayer,
    parse_integer_layers,
    unpack_words,
)
from neural_mp.errors import ModelLoadError


def _layer(bits: int, symmetric: bool, groups: int) -> IntegerLayer:
    random = np.random.default_rng(bits)
    codes = random.integers(0, 1 << bits, (16, 64)).astype(np.uint8)
    scales = random.uniform(0.5, 2, (16, groups)).astype(np.float16).astype(np.float32)
    zeros = np.full((16, groups), 1 << (bits - 1), np.uint8)
    if not symmetric:
        zeros = random.integers(0, 1 << bits, (16, groups)).astype(np.uint8)
    return IntegerLayer(codes, scales, zeros, bits, symmetric)


@pytest.mark.parametrize("form", list(CheckpointFormat))
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_layers_survive_writing_and_reading(form, bits, symmetric):
    layer = _layer(bits, symmetric, groups=2)
    tensors, config = FORMATS[form]({"a.fc": layer}, [])
    layers, used = parse_integer_layers(config, {**tensors, "norm.weight": np.ones(3)})
    assert used >= tensors.keys()
    assert "norm.weight" not in used
    assert np.array_equal(layers["a.fc"].codes, layer.codes)
    assert np.array_equal(layers["a.fc"].scales, layer.scales)
    assert np.array_equal(layers["a.fc"].zero_points, layer.zero_points)
    assert np.array_equal(layers["a.fc"].to_floats(), layer.to_floats())


def test_words_hold_the_first_code_in_the_lowest_bits():
    assert unpack_words(np.array([[0x21]], np.int32), 4, 3).tolist() == [[1, 2, 0]]
    assert unpack_words(np.array([[-1]], np.int32), 8, 4).tolist() == [[255] * 4]


@pytest.mark.parametrize("form", list(CheckpointFormat))
def test_every_missing_or_cut_tensor_is_an_error_of_the_layer(form):
    tensors, config = FORMATS[form]({"fc": _layer(4, False, 2)}, [])
    for name in tensors:
        remaining = {key: value for key, value in tensors.items() if key != name}
        cut = {**tensors, name: tensors[name][:1]}
        for damaged in (remaining, cut):
            if name.endswith(("zero_point", "g_idx")) and damaged is remaining:
                continue  # optional
            with pytest.raises(ModelLoadError):
                parse_integer_layers(config, damaged)
