"""The reported size of a model is what its weights take on disk, in every framework."""

import keras
import numpy as np
import pytest
import torch
from onnx_nets import as_onnx
from torch import nn

from neural_mp import MixedPrecision

#: What a file of a model holds beside its weights: its graph, names, headers.
MAX_OVERHEAD_BYTES, MAX_OVERHEAD_RATIO = 64 << 10, 0.02
WIDTH = 512
#: The file that a framework keeps weights in.
FILES = {"pytorch": "model.pt2", "onnxrt": "model.onnx", "tensorflow": "saved_model.pb"}


def dense_net():
    torch.manual_seed(0)
    layers = (nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(WIDTH, 10)).eval()


def keras_net():
    dense = [keras.layers.Dense(WIDTH, activation="relu") for _ in range(2)]
    return keras.Sequential(
        [keras.Input((1, 8, 8)), keras.layers.Flatten(), *dense, keras.layers.Dense(10)]
    )


class Tied(nn.Module):
    """An embedding whose table is the weight of the last layer, too."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(WIDTH, 256), nn.Linear(256, WIDTH, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(torch.relu(self.embedding(ids)))


def converted(source, data, folder, **options):
    tuner = MixedPrecision()
    tuner.model, tuner.calib_dataloader, tuner.objective = source, [data], "modelsize"
    tuner.workspace, tuner.cache, tuner.precisions = folder / "runs", False, "int8"
    for name, value in options.items():
        setattr(tuner, name, value)
    result = tuner()
    result.save(folder / "saved")
    return result


def check(size, on_disk):
    assert size <= on_disk <= size * (1 + MAX_OVERHEAD_RATIO) + MAX_OVERHEAD_BYTES


def net(framework):
    if framework == "tensorflow":
        return keras_net()
    return as_onnx(dense_net()) if framework == "onnxrt" else dense_net()


@pytest.mark.slow
@pytest.mark.parametrize("precisions", ["int8", "fp32"])
@pytest.mark.parametrize("framework", FILES)
def test_the_reported_sizes_are_those_of_the_files(framework, precisions, tmp_path):
    data = np.random.default_rng(0).random((4, 1, 8, 8), dtype=np.float32)
    result = converted(net(framework), data, tmp_path, precisions=precisions)
    check(result.report.size, (tmp_path / "saved" / FILES[framework]).stat().st_size)
    weights = 64 * WIDTH + WIDTH * WIDTH + WIDTH * 10 + 2 * WIDTH + 10
    assert result.report.baseline_size == pytest.approx(4 * weights, rel=0.01)


def test_a_weight_that_two_layers_share_counts_once_as_it_lies_on_disk(tmp_path):
    torch.manual_seed(0)
    ids = torch.randint(0, WIDTH, (4, 8))
    result = converted(Tied().eval(), ids, tmp_path)
    assert result.report.baseline_size == 4 * 256 * WIDTH
    check(result.report.size, (tmp_path / "saved" / FILES["pytorch"]).stat().st_size)
