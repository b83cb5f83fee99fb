"""Export to ONNX decomposes a program only if it holds ops without a translation."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor

pytestmark = pytest.mark.slow


class Replaced(nn.Module):
    """Every op that is replaced by an equal one that has a translation."""

    def __init__(self):
        super().__init__()
        self.line = nn.ConvTranspose1d(4, 3, 3)
        self.image = nn.ConvTranspose2d(
            4, 6, (3, 2), stride=(2, 3), padding=1, output_padding=(1, 2), groups=2, dilation=(1, 2)
        )
        self.volume = nn.ConvTranspose3d(3, 2, 2, stride=2, bias=False)

    def forward(self, x):
        line = self.line(x.mean(3))
        volume = self.volume(line.reshape(x.shape[0], 3, 2, 2, 2))
        pooled = nn.functional.adaptive_avg_pool2d(self.image(x), 1)
        return volume, pooled, (x > 0) & (x < 1)


def exported(module, x, folder):
    """The outputs of ONNX Runtime, and the nodes of the exported file."""
    adaptor, path = PyTorchAdaptor(), folder / "model.onnx"
    adaptor.export_onnx(adaptor.load(module, example=x), path, {})
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    nodes = onnx.load(path).graph.node
    return session.run(None, {session.get_inputs()[0].name: x.numpy()}), nodes


def check(outputs, expected):
    for output, reference in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(output, reference.numpy(), rtol=1e-4, atol=1e-5)


def test_a_graph_of_known_ops_is_captured_once(tmp_path, monkeypatch):
    def decomposed(*_, **__):
        raise AssertionError("the graph was captured again")

    monkeypatch.setattr(ExportedProgram, "run_decompositions", decomposed)
    torch.manual_seed(0)
    module, x = Replaced().eval(), torch.randn(3, 4, 6, 5)
    outputs, nodes = exported(module, x, tmp_path)
    with torch.no_grad():
        check(outputs, module(x))
    assert sum(node.op_type == "ConvTranspose" for node in nodes) == 3
    assert {"image", "line", "volume"} <= {node.name for node in nodes}


def test_other_ops_are_still_decomposed(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(3, 2, 6, 6)
    module = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(2)).eval()
    outputs, _ = exported(module, x, tmp_path)
    with torch.no_grad():
        check(outputs, [module(x)])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 8, batch_first=True)

    def forward(self, words):
        return self.layer(words)[0]


def test_the_length_of_sequences_has_a_name(tmp_path):
    torch.manual_seed(0)
    module, sequences = Recurrent().eval(), torch.randn(3, 7, 4)
    outputs, _ = exported(module, sequences, tmp_path)
    with torch.no_grad():
        check(outputs, [module(sequences)])
    graph = onnx.load(tmp_path / "model.onnx").graph
    axes = graph.input[0].type.tensor_type.shape.dim
    assert [axis.dim_param or axis.dim_value for axis in axes] == ["batch", "words_axis1", 4]
