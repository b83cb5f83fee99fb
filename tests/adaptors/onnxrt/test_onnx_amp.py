import pytest
import torch
from amp_contract import AmpContract
from onnx_nets import as_onnx
from test_pytorch_amp import Net

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor


class TestAmp(AmpContract):
    average, softmax = "AveragePool", "Softmax"

    @pytest.fixture(scope="class")
    def net(self):
        torch.manual_seed(0)
        return as_onnx(Net())


def test_fused_ops_are_known():
    assert {"Conv", "FusedConv", "FusedMatMul", "Gelu"} <= set(OnnxRuntimeAdaptor().op_types())
