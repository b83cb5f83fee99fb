"""Layers whose kernels, shapes or results differ from most: they run, are audited and reload."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.core.precision import Precision


def tuned(model, batches, tmp_path):
    converter = MixedPrecision(
        model=model.eval(), precisions="int8", objective="modelsize", workspace=tmp_path / "work"
    )
    converter.calib_dataloader = [(batch, None) for batch in batches]
    return converter()


def reloaded(result, tmp_path):
    result.save(tmp_path / "saved")
    return neural_mp.load(tmp_path / "saved")


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_the_audit_sees_the_integer_kernel_of_convolutions_along_any_axes(axes, tmp_path):
    kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    model = nn.Sequential(kind(4, 4, 1), kind(4, 6, 3, stride=2))
    audit = tuned(model, [torch.randn(4, 4, *[7] * axes)], tmp_path).audit()
    assert audit.holds
    assert [op.ran_in for op in audit.ops] == [Precision.INT8] * 2


class Best(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return self.layer(x).topk(2)


def test_what_torch_returns_under_names_is_saved_and_read_back(tmp_path):
    batch = torch.randn(4, 8)
    result = tuned(Best(), [batch], tmp_path)
    ours, theirs = (form.loaded(batch) for form in (reloaded(result, tmp_path), result))
    assert type(ours) is type(theirs) is torch.return_types.topk
    np.testing.assert_array_equal(ours.values, theirs.values)
    np.testing.assert_array_equal(ours.indices, theirs.indices)


class Scores(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class Named(Best):
    def forward(self, x):
        hidden = self.layer(x)
        return Scores(hidden * 2.0, hidden)


def test_a_named_tuple_of_the_users_own_is_read_back_by_name_and_by_position(tmp_path):
    batch = torch.randn(4, 8)
    result = tuned(Named(), [batch], tmp_path)
    ours, theirs = (form.loaded(batch) for form in (reloaded(result, tmp_path), result))
    assert isinstance(theirs, Scores)
    np.testing.assert_array_equal(ours.logits, theirs.logits)
    np.testing.assert_array_equal(ours[1], theirs.hidden)


class Margin(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(10, 10)

    def forward(self, x, target):
        return nn.functional.multi_margin_loss(self.layer(x), target)


def test_a_saved_model_keeps_the_ops_that_ran(tmp_path):
    """Torch has a second form of this loss, which rounds otherwise."""
    batch = torch.randn(4, 10), torch.arange(4)
    result = tuned(Margin(), [batch], tmp_path)
    loaded = reloaded(result, tmp_path)
    np.testing.assert_array_equal(loaded.loaded(batch), result.loaded(batch))


def test_a_layer_without_results_stays_in_fp32(tmp_path):
    model = nn.Sequential(nn.Linear(8, 0), nn.Linear(0, 4), nn.Linear(4, 4))
    result = tuned(model, [torch.randn(4, 8)], tmp_path)
    ran = {op: config.precision for op, config in result.plan.items()}
    assert ran == {"0": Precision.FP32, "1": Precision.FP32, "2": Precision.INT8}
