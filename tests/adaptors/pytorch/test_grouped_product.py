"""Products of experts run as in `transformers`, in files that need no other package."""

import pytest
import torch
from torch import nn
from transformers.integrations import moe  # noqa: F401 - registers the op

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.capture.canonicalize import grouped_product

ENDS = ([2, 5, 8], [0, 0, 8], [8, 8, 8], [0, 3, 3])


@pytest.mark.parametrize("ends", ENDS)
def test_the_product_is_that_of_each_expert(ends):
    torch.manual_seed(0)
    rows, matrices, offsets = torch.randn(8, 5), torch.randn(3, 5, 7), torch.tensor(ends)
    product = grouped_product(rows, matrices, offsets)
    starts = [0, *ends[:-1]]
    for matrix, start, end in zip(matrices, starts, ends, strict=True):
        torch.testing.assert_close(product[start:end], rows[start:end] @ matrix)


class Experts(nn.Module):
    """Rows that are sorted by their expert, with the op of `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.matrices = nn.Parameter(torch.randn(3, 6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.head(x)
        ends = (torch.arange(1, 4) * rows.shape[0]) // 3
        return torch.ops.transformers.grouped_mm_fallback(rows, self.matrices, ends)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.ops.transformers, "grouped_mm_fallback"),
    reason="transformers before 5.3 has no op for the product of experts",
)
@pytest.mark.usefixtures("quick_runs")
def test_a_saved_model_needs_no_op_of_another_package(tmp_path):
    torch.manual_seed(0)
    net = Experts().eval()
    batches = [torch.randn(6, 6) for _ in range(3)]
    converter = MixedPrecision(
        model=net,
        precisions="int8",
        objective="modelsize",
        calib_dataloader=[(batch, None) for batch in batches],
        workspace=tmp_path / "workspace",
    )
    result = converter()
    with torch.no_grad():
        expected = net(batches[0])
    assert (result(batches[0]) - expected).norm() <= 0.1 * expected.norm()
    result.save(tmp_path / "saved")
    assert torch.equal(neural_mp.load(tmp_path / "saved")(batches[0]), result(batches[0]))
