"""Grids of 16 bits leave room for values beyond the calibrated range."""

import numpy as np
import pytest

from neural_mp.adaptors.onnxrt.targets.quant_grid import make_observed_grid
from neural_mp.core.enums import QuantDType
from neural_mp.targets import load_profile


@pytest.mark.parametrize(
    ("dtype", "covered"), [("uint8", 1.0), ("uint16", 2.0), ("int8", 1.0), ("int16", 2.0)]
)
def test_values_beyond_the_calibrated_range_saturate_in_8_bits_only(dtype, covered):
    """A calibration set is a sample: other data exceeds its range."""
    low, high = -1.5, 3.0
    grid = make_observed_grid(low, high, QuantDType(dtype), load_profile("qnn").activation)
    beyond = np.array([covered * low, covered * high], np.float32)
    restored = grid.dequantize_integers(grid.quantize_values(beyond))
    np.testing.assert_allclose(restored, beyond, atol=float(grid.scale))
    far = np.array([3 * high], np.float32)
    assert grid.dequantize_integers(grid.quantize_values(far)) < 2.1 * high
