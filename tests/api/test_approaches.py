"""Dynamic and weight-only INT8, from the face: what needs no calibration."""

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError, DataError

pytestmark = pytest.mark.usefixtures("quick_runs")


def dense_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).eval()


@pytest.mark.parametrize("approach", ["dynamic", "weight_only"])
def test_dense_layers_need_no_data_where_nothing_is_calibrated(approach, digits):
    converter = MixedPrecision()
    converter.model = dense_net()
    converter.precisions = "int8"
    converter.approach = approach
    converter.inputs = np.zeros((2, 1, 8, 8), np.float32)
    result = converter.fit()
    assert {config.approach for config in result.plan.values()} == {approach}
    assert result.report.size < 0.4 * result.report.baseline_size
    images = digits[1].images[:20]
    with torch.no_grad():
        expected = dense_net()(torch.from_numpy(images)).numpy()
    assert np.abs(result(images) - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow
def test_a_dynamic_result_is_saved_and_its_plan_replayed(digits, tmp_path):
    from neural_mp.api.replay import convert_with_plan

    converter = MixedPrecision()
    converter.model = dense_net()
    converter.precisions = "int8"
    converter.approach = "dynamic"
    converter.inputs = np.zeros((2, 1, 8, 8), np.float32)
    result = converter.fit()
    result.save(tmp_path / "saved")
    images = digits[1].images[:20]
    restored = neural_mp.load(tmp_path / "saved")
    np.testing.assert_array_equal(restored(images), result(images))
    replayed = convert_with_plan(dense_net(), result.plan, inputs=converter.inputs)
    np.testing.assert_array_equal(replayed(images), result(images))


def test_int8_without_data_says_which_way_needs_none():
    converter = MixedPrecision()
    converter.model = dense_net()
    converter.precisions = "int8"
    with pytest.raises(DataError, match="approach = 'dynamic'"):
        converter.fit()


@pytest.mark.parametrize(("option", "word"), [("approach", "dynamc"), ("capture", "module")])
def test_an_unknown_word_for_an_option_is_named(option, word):
    converter = MixedPrecision()
    converter.model = dense_net()
    setattr(converter, option, word)
    with pytest.raises(ConfigurationError, match=f"{option} cannot be '{word}'; did you mean"):
        converter.fit()
