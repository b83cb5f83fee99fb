"""Rounded weights in files: what was written is read, and damaged files cost time only."""

import io

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
)
from neural_mp.adaptors.common.weights.weight_store import WeightStore
from neural_mp.core.quant_spec import QuantSpec

SPEC = QuantSpec.parse("uint4 asymmetric per_group 16")
WEIGHT = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return WeightStore(tmp_path_factory.mktemp("weights"), "scope")


@pytest.fixture(scope="module")
def content(store):
    """The bytes of a file with one weight."""
    rounded = Quantizer(SPEC, GroupParameters.BFLOAT16).round_to_nearest(WEIGHT)
    store.store_weights({"layer": rounded}, {"layer": SPEC})
    (file,) = store.folder.iterdir()
    return file.read_bytes()


def read(store, content):
    (file,) = store.folder.iterdir()
    file.write_bytes(content)
    return store.load_weights({"layer": WEIGHT}, {"layer": SPEC})


def test_a_weight_is_read_as_written(store, content):
    restored = read(store, content)["layer"]
    rounded = Quantizer(SPEC, GroupParameters.BFLOAT16).round_to_nearest(WEIGHT)
    assert np.array_equal(restored.codes, rounded.codes)
    assert np.array_equal(restored.scales, rounded.scales)
    assert store.load_weights({"layer": WEIGHT}, {"layer": SPEC}, "other conditions") is None


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_file_is_ignored_or_has_a_weight_of_the_same_form(store, content, place, value):
    start = int(place * len(content))
    restored = read(store, content[:start] + value + content[start + len(value) :])
    assert restored is None or isinstance(restored["layer"], GroupedWeight)
    assert restored is None or restored["layer"].codes.max() < 16


@pytest.mark.parametrize("cut", [0, 1, 100, -1])
def test_a_cut_file_is_ignored(store, content, cut):
    assert read(store, content[:cut]) is None


def test_a_single_array_is_ignored(store, content):
    buffer = io.BytesIO()
    np.save(buffer, WEIGHT)
    assert read(store, buffer.getvalue()) is None
