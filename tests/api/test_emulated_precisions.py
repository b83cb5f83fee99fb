"""More precisions never give a slower result: emulated 16 bits enter no plan unless forced."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from machine import INTEGER_FLAGS, machine
from onnx import TensorProto, helper
from onnx_nets import as_onnx
from torch import nn

from neural_mp import MixedPrecision
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import UnsupportedPrecisionError

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]

INT8, BF16 = Precision.INT8, Precision.BF16
WITH_BF16 = Hardware("with BF16", INTEGER_FLAGS | {"avx512_bf16"}, 2)
WITHOUT, FORCED = machine(), machine(BF16)
FRAMEWORKS = ("onnxrt", "pytorch", "tensorflow")


class Attending(nn.Module):
    """A convolution in INT8, and a product of computed tensors, which 16 bits alone can lower."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.conv(image)).flatten(2)
        return torch.softmax(features @ features.transpose(1, 2), 2)


def sum_of_integers() -> Any:
    """An ONNX model without floats."""
    ports = [helper.make_tensor_value_info(n, TensorProto.INT64, ["n", 3]) for n in "xy"]
    graph = helper.make_graph(
        [helper.make_node("Add", ["x", "x"], ["y"])], "g", *map(list, zip(ports))
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@cache
def net(framework: str) -> tuple[Any, np.ndarray]:
    """The net in a framework, and images."""
    images = np.random.default_rng(0).random((8, 1, 8, 8), dtype=np.float32)
    if framework == "tensorflow":
        keras_nets = pytest.importorskip("keras_nets")
        return keras_nets.small_net(), images.transpose(0, 2, 3, 1)
    torch.manual_seed(0)
    attending = Attending().eval()
    return as_onnx(attending) if framework == "onnxrt" else attending, images


def converted(framework: str, hardware: Hardware, precisions: str | None, **options) -> Any:
    converter = MixedPrecision(cache=False, **options)
    converter.model, images = net(framework)
    converter.calib_dataloader = [images]
    converter.hardware = hardware
    if precisions is not None:
        converter.precisions = precisions
    return converter()


def ran_in(result: OptimizedModel) -> set[Precision]:
    return {config.precision for config in result.plan.values()}


def said(result: OptimizedModel) -> str:
    return " ".join(result.report.warnings)


@pytest.mark.parametrize("precisions", [None, "int8,bf16"])
@pytest.mark.parametrize("hardware", [WITH_BF16, WITHOUT])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_no_emulated_op_enters_a_plan(framework, hardware, precisions):
    assert converted(framework, hardware, precisions).report.emulated == ()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_what_is_forced_enters(framework):
    result = converted(framework, FORCED, "int8,bf16", op_wise={".*": "bf16"})
    assert result.report.emulated == ("bf16",)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_bf16_alone_where_the_machine_lacks_it_names_the_flag_and_the_way_round(framework):
    with pytest.raises(UnsupportedPrecisionError, match="avx512_bf16.*FORCE_BF16=1"):
        converted(framework, WITHOUT, "bf16")


def test_what_the_runtime_alone_lacks_goes_with_a_warning_and_the_plan_is_that_of_int8():
    mixed, int8_only = (
        converted("onnxrt", WITH_BF16, precisions) for precisions in ("int8,bf16", "int8")
    )
    assert mixed.plan == int8_only.plan
    assert INT8 in ran_in(mixed)
    assert "onnxrt has no bf16 kernels here that reduce latency" in said(mixed)
    assert "FORCE_BF16=1" in said(mixed)
    assert "bf16" not in said(converted("onnxrt", WITH_BF16, None))  # nobody asked


@pytest.mark.parametrize(
    "options",
    [
        {"precisions": "bf16"},
        {"precisions": "int8,bf16", "strategy": "auto_mixed_precision"},
        {"precisions": "int8,bf16", "objective": "modelsize"},
        {"precisions": "int8,bf16", "optype_wise": {"MatMul": "bf16"}},
    ],
)
def test_it_enters_where_it_is_asked_for_in_place_of_int8_or_not_for_speed(options):
    options = dict(options)
    result = converted("onnxrt", WITH_BF16, options.pop("precisions"), **options)
    assert BF16 in ran_in(result)
    assert "onnxrt has no bf16 kernels here: bf16 is emulated" in said(result)


def test_a_forced_precision_that_no_op_can_run_in_is_an_error():
    """Not a result in FP32; other precisions may still be searched."""
    converter = MixedPrecision(cache=False)
    converter.model = sum_of_integers()
    converter.calib_dataloader = [np.ones((2, 3), np.int64)]
    converter.hardware = FORCED
    converter.precisions = "bf16"
    with pytest.raises(UnsupportedPrecisionError, match="FORCE_BF16=1 is set, but no op of this"):
        converter()
    converter.hardware = WITH_BF16
    assert "no op of this model can run in bf16; continuing without it" in said(converter())
