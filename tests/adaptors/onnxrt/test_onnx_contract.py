import numpy as np
import pytest
from onnx_nets import kernels, run

from neural_mp.core.precision import Precision
from neural_mp.testing import AdaptorContract, uniform

BF16, FP16, INT8 = Precision.BF16, Precision.FP16, Precision.INT8


class TestOnnx(AdaptorContract):
    framework = "onnxrt"
    input_name = "image"
    # Of the image and of the logits.
    casts_in_16_bits = (FP16, 2)

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, _exported):
        return _exported["small"]

    @pytest.fixture(scope="class")
    @classmethod
    def reference(cls, source, images) -> np.ndarray:
        return run(source, image=images)[0]

    def test_an_int8_plan_runs_integer_kernels(self, adaptor, space, convert):
        """Every layer the plan has in INT8 is one integer kernel, and nothing else computes."""
        converted = convert(uniform(space, INT8))
        kernel_counts = kernels(adaptor.native(converted))
        assert kernel_counts["QLinearConv"] == 6
        assert kernel_counts["QLinearAdd"] == 2
        assert kernel_counts["QLinearGlobalAveragePool"] == 1
        assert kernel_counts["MatMulIntegerToFloat"] == 1
        assert not {"Conv", "FusedConv", "Gemm", "MatMul"} & set(kernel_counts)
        counts = converted.counts
        assert kernel_counts["QuantizeLinear"] == counts.quantize == 1
        assert kernel_counts["DequantizeLinear"] == counts.dequantize

    def test_bf16_rounds_every_result_once_and_nothing_else(self, adaptor, space, convert, images):
        """ONNX Runtime has no BF16 kernels here: results are rounded between FP32 kernels."""
        converted = convert(uniform(space, BF16))
        kernel_counts = kernels(adaptor.native(converted))
        assert converted.counts.casts == kernel_counts["Cast"]
        result = adaptor.predict(converted, images)
        bits = result.view(np.uint32)
        assert not (bits & 0xFFFF).any()  # the logits themselves are BF16 numbers
