import numpy as np
import pytest
import torch
from contract_nets import EveryKind
from onnx_nets import as_onnx, graph, op

from neural_mp import MixedPrecision
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.testing import AmpContract


@pytest.mark.usefixtures("quick_runs")
class TestAmp(AmpContract):
    average, softmax = "AveragePool", "Softmax"

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls):
        torch.manual_seed(0)
        return as_onnx(EveryKind())

    @pytest.fixture(autouse=True)
    def _all_of_it_is_in_float32(self, request, net):
        forced = ("everything_can_be_forced", "level_of_tensorflows_own_pass")
        if any(part in request.node.name for part in forced) and any(
            node.op_type == "Shape" for node in net.graph.node
        ):
            pytest.skip("this torch exports nodes that compute sizes: integers, never in 16 bits")


def test_fused_ops_are_known():
    assert {"Conv", "FusedConv", "FusedMatMul", "Gelu"} <= set(OnnxRuntimeAdaptor().op_types())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_mask_of_the_lowest_number_is_no_infinity(precision, monkeypatch):
    """A row of minus infinities is NaN behind a softmax; which numbers it has is of no account."""
    monkeypatch.setenv("FORCE_BF16", "1")
    monkeypatch.setenv("FORCE_FP16", "1")
    data = np.random.default_rng(0).random((4, 8), np.float32)
    masked = graph(
        [op("MatMul", "x w", "a"), op("Add", "a k", "b"), op("Softmax", "b", "y")],
        {"x": ["b", 8]},
        ["y"],
        {"w": np.eye(8, dtype=np.float32), "k": np.full(8, np.finfo(np.float32).min)},
    )
    converter = MixedPrecision()
    converter.model, converter.precisions = masked, precision
    np.testing.assert_allclose(converter()(data).sum(1), 1, atol=0.01)
