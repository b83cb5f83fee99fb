"""PyTorch models compared op by op."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import ComparisonContract, machine, uniform
from neural_mp.tuning.measurement.comparison import compare_models


def convolutions(net: nn.Module) -> list[nn.Conv2d]:
    return [module for module in net.modules() if isinstance(module, nn.Conv2d)]


@pytest.mark.slow
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
        outputs: list[np.ndarray] = []
        hook = convolutions(source)[5].register_forward_hook(
            lambda module, inputs, output: outputs.append(output.numpy().copy())
        )
        with torch.no_grad():
            source(torch.from_numpy(images))
        hook.remove()
        return outputs[0]

    @staticmethod
    def first_layer(source):
        layer = convolutions(source)[0]
        return layer.weight.detach().numpy(), layer.bias.detach().numpy()


def test_ops_keep_their_names_in_files_where_exporting_numbers_additions_anew(tmp_path):
    """Sums of tensors are numbered together with those of sizes, which a second export has not."""

    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            positions = torch.arange(x.shape[1]) + torch.arange(x.shape[1] + 2)[2:]
            x = x + positions[:, None]
            x = self.one(x) + torch.cat([x, x], 1)[:, : x.shape[1]]
            x = self.two(x) + x
            return x.reshape(-1, 8) + 1

    inputs = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(Positions().eval(), example=inputs)
    space = adaptor.space(model, machine())
    observations = adaptor.observe(model, [inputs], space)
    converted = adaptor.convert(
        model, space.resolve(uniform(space, Precision.INT8)), observations, space
    )
    adaptor.save(converted, tmp_path)
    restored = adaptor.restore(tmp_path)
    assert [op.name for op in adaptor.graph(restored)] == [
        op.name for op in adaptor.graph(converted)
    ]
    comparison = compare_models(
        LoadedModel(adaptor, converted), LoadedModel(adaptor, restored), [inputs]
    )
    assert len(comparison.layers) > 4
    assert not comparison.left_out.get("are fused into another op in B")
    assert all(layer.sqnr > 100 for layer in comparison.layers)
