"""Values cast to 16 bits: saturating, and without passes over all values that change nothing."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neural_mp.adaptors.pytorch.graph.casts import cast_saturating


class _CountedOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.over_all_values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.numel() > 1:
            self.over_all_values += 1
        return result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_within_the_range_are_cast_and_checked_in_two_passes(dtype):
    values = torch.randn(64, 64)
    with _CountedOps() as counted:
        low = cast_saturating(values, dtype)
    assert counted.over_all_values == 2  # the cast, and whether a value became infinite
    assert torch.equal(low, values.to(dtype))


def test_masks_beyond_the_range_stay_finite_and_infinities_stay_infinite():
    lowest, infinite = torch.finfo(torch.float32).min, float("-inf")
    low = cast_saturating(torch.tensor([lowest, infinite, 1.0]), torch.float16)
    assert low.tolist() == [torch.finfo(torch.float16).min, infinite, 1.0]
