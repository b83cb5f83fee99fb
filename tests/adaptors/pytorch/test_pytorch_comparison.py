"""PyTorch models compared op by op."""

import copy

import numpy as np
import pytest
import torch
from comparison_contract import ComparisonContract
from torch import nn

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor


def convolutions(net: nn.Module) -> list[nn.Conv2d]:
    return [module for module in net.modules() if isinstance(module, nn.Conv2d)]


class TestPyTorch(ComparisonContract):
    framework = "pytorch"
    convolution = "conv2d"

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, _trained):
        return _trained[1]

    @pytest.fixture(scope="class")
    @classmethod
    def planted(cls, source, images):
        def load(factor: float):
            net = copy.deepcopy(source)
            with torch.no_grad():
                convolutions(net)[5].weight *= factor
                convolutions(net)[5].bias *= factor
            return PyTorchAdaptor().load(net, example=images)

        return load

    @staticmethod
    def own(source, images):
        seen: list[np.ndarray] = []
        hook = convolutions(source)[5].register_forward_hook(
            lambda module, inputs, output: seen.append(output.numpy().copy())
        )
        with torch.no_grad():
            source(torch.from_numpy(images))
        hook.remove()
        return seen[0]

    @staticmethod
    def first_layer(source):
        layer = convolutions(source)[0]
        return layer.weight, layer.bias.detach().numpy()
