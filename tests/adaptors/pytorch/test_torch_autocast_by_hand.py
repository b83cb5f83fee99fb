"""Autocast by the four lists, in code that users write by hand."""

import pytest
import torch
from torch.nn import functional as F

from neural_mp.training import autocast

PRECISIONS = pytest.mark.parametrize("precision", ["bf16", "fp16"])


@PRECISIONS
@pytest.mark.parametrize("lowest", [-1e9, -3e38])
def test_scores_may_be_masked_with_a_number_that_float16_cannot_hold(precision, lowest):
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 6, 8, generator=generator).requires_grad_()
    above = torch.ones(6, 6).triu(1).bool()

    def attention():
        return (query @ key.T).masked_fill(above, lowest).softmax(-1)

    expected = attention()
    with autocast(precision):
        scores = attention()
        again = (query @ key.T).masked_fill(above, 0.0)
    assert again.dtype != torch.float32  # the next mask is none of these
    torch.testing.assert_close(scores.float(), expected, rtol=0.05, atol=0.02)
    assert not scores[above].any()


@PRECISIONS
def test_a_sparse_matrix_multiplies_what_comes_in_16_bits(precision):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator).requires_grad_()
    neighbours = torch.rand(16, 16, generator=generator).round().to_sparse()
    features = torch.randn(16, 8, generator=generator)

    def gradient():
        out = torch.sparse.mm(neighbours, F.linear(features, weight))
        return torch.autograd.grad(out.float().square().mean(), weight)[0]

    expected = gradient()
    with autocast(precision):
        actual = gradient()
    assert (actual - expected).norm() < 0.02 * expected.norm()
