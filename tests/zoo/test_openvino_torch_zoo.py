"""Layers, sequences and constructs as OpenVINO reads them from PyTorch: tuned, audited, reloaded.

Outputs are compared with OpenVINO's own in FP32: its reading of a module is not ours to answer for.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from ov_nets import run
from torch import nn
from zoo import torch_constructs, torch_layers, torch_sequences
from zoo.harness import Built, Case, convert

from neural_mp.adaptors.openvino.runtime import ov

pytestmark = pytest.mark.slow

CASES = {
    case.name: case
    for module in (torch_layers, torch_sequences, torch_constructs)
    for case in module.CASES
}
#: One of each kind that the reader of OpenVINO accepts.
NAMES = (
    "GELU",
    "Hardswish",
    "PReLU",
    "ReLU",
    "SiLU",
    "Softmax",
    "GLU",
    "Conv1d",
    "Conv2d",
    "Conv2d grouped",
    "Conv2d depthwise",
    "Conv2d reflect",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Linear",
    "Linear no bias",
    "Fold",
    "Unfold",
    "BatchNorm1d",
    "BatchNorm2d",
    "InstanceNorm2d",
    "GroupNorm",
    "LayerNorm",
    "RMSNorm",
    "AdaptiveAvgPool2d",
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "LPPool2d",
    "MaxPool2d",
    "MaxPool2d indices",
    "CircularPad2d",
    "ConstantPad3d",
    "ChannelShuffle",
    "PixelShuffle",
    "Flatten",
    "Upsample nearest",
    "Upsample bicubic",
    "Embedding",
    "EmbeddingBag mean",
    "LSTM",
    "LSTM two-way",
    "GRU two layers",
    "RNN",
    "LSTM given a state",
    "GRUCell",
    "scaled_dot_product_attention",
    "if of a value",
    "outputs that are inputs",
    "outputs of integers and booleans",
    "module called twice",
    "module with tied weights",
    "weight_norm",
    "arguments left out",
    "selection by values",
    "float16 inside",
    "float64",
)


def taken_in(case: Case) -> Case:
    """Return a case whose model is what OpenVINO makes of the module."""

    def build() -> Built:
        built = case.build()
        assert isinstance(built.model, nn.Module)
        batches = [_arrays(batch) for batch in built.batches]
        example = tuple(map(torch.as_tensor, batches[0]))
        model = ov.convert_model(
            built.model.eval(), example_input=example if len(example) > 1 else example[0]
        )
        outputs = [run(model, *batch) for batch in batches]
        feeds = [batch if len(batch) > 1 else batch[0] for batch in batches]
        return Built(model, feeds, outputs)

    return replace(case, build=build)


def _arrays(batch: object) -> tuple[np.ndarray, ...]:
    several = batch if isinstance(batch, tuple | list) else (batch,)
    return tuple(np.asarray(part) for part in several)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name.replace(" ", "_"))
def test_a_module_runs_in_openvino_is_audited_and_reloads(name, tmp_path):
    convert(taken_in(CASES[name]), tmp_path)
