"""The commands on an ONNX file."""

import json

import onnx
import pytest
from command_cases import CommandCases
from command_here import run_main
from onnx_nets import graph, op

pytestmark = pytest.mark.slow


class TestOnnx(CommandCases):
    convolution = "Conv"

    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, _exported, tmp_path_factory):
        path = tmp_path_factory.mktemp("onnx") / "net.onnx"
        onnx.save(_exported["small"], path)
        return path


def test_explain_gives_the_reason_for_fp32_where_the_runtime_has_an_integer_kernel(tmp_path):
    """ONNX Runtime has `QLinearSoftmax`, slower than Softmax in FP32."""
    net, path = graph([op("Softmax", "x", "y")], {"x": [None, 8]}, ["y"]), tmp_path / "net.onnx"
    onnx.save(net, path)
    code, out, _ = run_main("explain", str(path), "y", "--precision", "int8", "--json")
    assert code == 0
    assert json.loads(out)["precisions"]["int8"] == {
        "list": None,
        "decision": "fp32",
        "reason": "ONNX Runtime's integer kernel QLinearSoftmax is slower than its FP32 kernel",
    }
