"""Groups between calibration and conversion: read back as made, in few bytes, without a trace."""

import gc
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.common.weights.weight_store import GroupHolder
from neural_mp.core.quant_spec import QuantSpec

WEIGHTS = np.random.default_rng(0).normal(size=(3, 256, 1008)).astype(np.float32)


def rounded(bits):
    quantizer = Quantizer(QuantSpec.parse(f"uint{bits} asymmetric per_group 16"))
    return [quantizer.round_to_nearest(weight) for weight in WEIGHTS]


@pytest.mark.parametrize("in_file", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_held_groups_are_read_as_made(bits, in_file, tmp_path):
    holder = GroupHolder(tmp_path / "weights" if in_file else None)
    weights = rounded(bits)
    stored = [holder.hold_weight(weight) for weight in weights]
    for original, restored in zip(weights, stored, strict=True):
        assert np.array_equal(restored.codes, original.codes)
        assert np.array_equal(restored.scales, original.scales)
        assert np.array_equal(restored.offsets, original.offsets)
        assert np.array_equal(restored.to_floats(), original.to_floats())
        assert restored.num_inputs == 1008


@pytest.mark.parametrize(("in_file", "most"), [(False, 0.55), (True, 0.01)])
def test_held_groups_take_half_a_byte_per_code_or_a_file(in_file, most, tmp_path):
    holder = GroupHolder(tmp_path if in_file else None)
    weights = rounded(4)
    codes = sum(weight.codes.size for weight in weights)
    tracemalloc.start()
    stored = [holder.hold_weight(weight) for weight in weights]
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(stored) == len(weights)
    assert grown <= most * codes


def test_other_fields_change_without_reading_the_codes(tmp_path):
    holder = GroupHolder(tmp_path)
    stored = holder.hold_weight(rounded(4)[0])
    factors = np.ones(1008, np.float32)
    assert replace(stored, input_factors=factors).groups is stored.groups
    assert holder.hold_weight(stored) is stored


def test_the_file_ends_with_the_weights(tmp_path):
    stored = GroupHolder(tmp_path).hold_weight(rounded(4)[0])
    gc.collect(1)  # the weight alone keeps the file
    assert stored.codes.max() <= 15
    del stored
    gc.collect(1)
    assert not list(tmp_path.iterdir())


def test_codes_stay_in_memory_if_the_folder_cannot_be_made(tmp_path):
    path = tmp_path / "file"
    path.touch()
    weight = rounded(3)[0]
    assert np.array_equal(GroupHolder(path).hold_weight(weight).codes, weight.codes)
