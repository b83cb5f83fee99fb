"""Which form of a tensor is made of which, and how often, whatever the framework."""

import ml_dtypes
import numpy as np
import pytest

from neural_mp.adaptors.common.named_graphs import (
    BF16,
    FP16,
    FP32,
    UINT8,
    TensorVariants,
)
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.core.quantization_flow import QuantizationFlow

FLOW = QuantizationFlow({}, {}, frozenset(), {"x": "x", "moved": "x"}, {"x": ("x",)})
RANGES = {"x": (-1.0, 1.55)}


class Written(TensorVariants[str]):
    """A graph of words: what was put in, in order."""

    def __init__(self, constants=(), dequantized_to=(FP32,)):
        super().__init__(FLOW, RANGES)
        self.constants, self.nodes = dict(constants), []
        self.dequantized_to = dequantized_to

    def add(self, *parts):
        self.nodes.append(" ".join(parts))
        return self.nodes[-1]

    def name_of(self, tensor):
        return tensor

    def get_constant_value(self, tensor):
        return self.constants.get(tensor)

    def insert_16_bit_constant(self, tensor, form, values):
        self.constants[f"{tensor} in {form}"] = values
        return f"{tensor} in {form}"

    def insert_cast(self, tensor, source, form):
        self.count_conversion("casts")
        return self.add("cast", self.as_float(tensor, source), form)

    def insert_quantize(self, tensor, real):
        self.count_conversion("quantize")
        return self.add("quantize", real)

    def insert_dequantize(self, tensor, form):
        self.count_conversion("dequantize")
        return self.add("dequantize", self.as_uint8(tensor), form)


def test_what_was_never_converted_is_there_as_it_was():
    forms = Written()
    assert forms.as_float("x") == "x"
    assert forms.nodes == []
    assert forms.counts == ConversionCounts()


@pytest.mark.parametrize(
    ("written", "wanted", "nodes"),
    [
        ({}, BF16, ["cast x bf16"]),
        ({}, UINT8, ["quantize x"]),
        ({BF16: "x16"}, FP32, ["cast x16 fp32"]),
        ({BF16: "x16"}, FP16, ["cast x16 fp16"]),
        ({BF16: "x16"}, UINT8, ["cast x16 fp32", "quantize cast x16 fp32"]),
        ({UINT8: "x8"}, FP32, ["dequantize x8 fp32"]),
        ({UINT8: "x8"}, FP16, ["dequantize x8 fp32", "cast dequantize x8 fp32 fp16"]),
    ],
)
def test_a_form_is_made_of_the_nearest_and_only_once(written, wanted, nodes):
    forms = Written()
    for form, value in written.items():
        forms.set_variant("x", form, value)
    ask = forms.as_uint8 if wanted == UINT8 else lambda tensor: forms.as_float(tensor, wanted)
    assert ask("x") == ask("x") == nodes[-1]
    assert forms.nodes == nodes


def test_a_dequantization_writes_16_bits_where_the_framework_can():
    forms = Written(dequantized_to=(FP32, BF16))
    forms.set_variant("x", UINT8, "x8")
    assert forms.as_float("x", BF16) == "dequantize x8 bf16"
    assert forms.counts == ConversionCounts(dequantize=1)


def test_what_was_computed_in_fp32_is_not_read_dequantized():
    """An op in FP32 behind one in INT8 that has had the tensor quantized."""
    forms = Written()
    assert forms.as_uint8("x") == "quantize x"
    assert forms.as_float("x") == "x"
    assert forms.is_stored("x")
    assert not forms.is_stored("y")


def test_constants_are_stored_in_16_bits_and_stay_finite():
    forms = Written({"w": np.array([1 + 2**-10, -3e38], np.float32)})
    assert forms.as_float("w", FP16) == "w in fp16"
    np.testing.assert_array_equal(forms.constants["w in fp16"], np.float16([1 + 2**-10, -65504]))
    assert forms.as_float("w", BF16) == "w in bf16"
    assert forms.constants["w in bf16"].dtype == ml_dtypes.bfloat16
    assert forms.counts == ConversionCounts()


def test_tensors_that_share_a_scale_are_stored_alike():
    forms = Written()
    assert forms.get_quant_params("moved") == forms.get_quant_params("x")
    assert forms.get_quant_params("x").scale == pytest.approx(0.01)
    assert forms.get_quant_params("x").zero_point == 100
