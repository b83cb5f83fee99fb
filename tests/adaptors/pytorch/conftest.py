"""Inputs and a net for the tests of `autocast`."""

import pytest
import torch
from autocast_nets import GatedNet


@pytest.fixture
def gated_net() -> GatedNet:
    """An untrained net, with the same weights in every test."""
    torch.manual_seed(0)
    return GatedNet()


@pytest.fixture(scope="session")
def digit_batch(digits) -> tuple[torch.Tensor, torch.Tensor]:
    """64 digits with their labels."""
    return torch.from_numpy(digits[0].images[:64]).float(), torch.from_numpy(digits[0].labels[:64])


@pytest.fixture
def square() -> torch.Tensor:
    """A random 4×4 matrix."""
    torch.manual_seed(0)
    return torch.randn(4, 4)
