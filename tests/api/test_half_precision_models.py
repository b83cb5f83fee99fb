"""A model in half precision is reported in its own precision: baseline, plan, tables and page."""

from __future__ import annotations

import base64
import io
import re

import keras
import numpy as np
import onnx
import pytest
import torch
from machine import machine
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from torch import nn

from neural_mp import ExitPolicy, MixedPrecision, PrecisionPlan
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import Precision
from neural_mp.errors import PlanError
from neural_mp.reporting import LiveListener, build_capability_table, result_tables
from neural_mp.reporting.displays import render_cell

pytestmark = pytest.mark.usefixtures("quick_runs")

FP32, FP16, BF16 = Precision.FP32, Precision.FP16, Precision.BF16
WIDTHS = (16, 64, 4)
#: Weights of the two layers, without biases.
WEIGHTS = WIDTHS[0] * WIDTHS[1] + WIDTHS[1] * WIDTHS[2]


def _torch_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    a, b, c = WIDTHS
    layers = nn.Linear(a, b, bias=False), nn.ReLU(), nn.Linear(b, c, bias=False)
    return nn.Sequential(*layers).eval().to(dtype)


def _keras_net(policy: str) -> keras.Model:
    keras.utils.set_random_seed(0)
    a, b, c = WIDTHS
    x = keras.Input((a,), dtype="float16" if policy == "float16" else "float32")
    h = keras.layers.Dense(b, "relu", use_bias=False, dtype=policy)(x)
    return keras.Model(x, keras.layers.Dense(c, use_bias=False, dtype=policy)(h))


def _onnx_net() -> onnx.ModelProto:
    rng, (a, b, c) = np.random.default_rng(0), WIDTHS
    weights = [rng.normal(size=s).astype(np.float16) for s in ((a, b), (b, c))]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "v"], ["h"]),
            helper.make_node("Relu", ["h"], ["r"]),
            helper.make_node("MatMul", ["r", "w"], ["y"]),
        ],
        "half",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT16, ["n", a])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT16, ["n", c])],
        [numpy_helper.from_array(w, n) for w, n in zip(weights, "vw", strict=True)],
    )
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


#: Name → model, precision that it computes in, NumPy dtype of its inputs, bytes of a weight in the
#: graph that runs (of mixed precision, TensorFlow folds the casts of the weights).
MODELS = {
    "torch half": (lambda: _torch_net(torch.float16), FP16, np.float16, 2),
    "torch bfloat16": (lambda: _torch_net(torch.bfloat16), BF16, np.float32, 2),
    "onnx float16": (_onnx_net, FP16, np.float16, 2),
    "keras float16": (lambda: _keras_net("float16"), FP16, np.float16, 2),
    "keras mixed_bfloat16": (lambda: _keras_net("mixed_bfloat16"), BF16, np.float32, 2),
}


def _unchanged(model: object, dtype: type) -> MixedPrecision:
    converter = MixedPrecision(precisions="fp32", cache=False)
    converter.model = model
    batch = np.random.default_rng(1).normal(size=(64, WIDTHS[0])).astype(dtype)
    converter.eval_dataloader = [(batch, np.arange(64) % WIDTHS[-1])]
    converter.metric = "topk"
    return converter


def _shown(report, met) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(result_tables(report, met))
    return console.file.getvalue()


@pytest.mark.parametrize("kind", MODELS)
def test_an_unchanged_model_is_named_by_its_own_precision(kind):
    """Baseline, op counts, plan, size, table and page name it, and nothing is called FP32."""
    make, precision, dtype, weight_bytes = MODELS[kind]
    result = _unchanged(make(), dtype).fit()
    report = result.report
    assert report.source_precisions == (precision,)
    assert {p for by in report.op_counts.values() for p in by} == {precision}
    assert report.baseline_size == report.size == WEIGHTS * weight_bytes
    assert report.converted == ()
    assert result.plan.source_precisions == (precision,)
    name = precision.name
    assert name in repr(result.plan)
    assert name in _shown(report, result.met)
    assert "FP32" not in _shown(report, result.met)
    assert f">{name}<" in render_cell(report)
    assert "FP32" not in render_cell(report)


def test_the_progress_of_a_run_names_the_precision():
    screen = io.StringIO()
    converter = _unchanged(_onnx_net(), np.float16)
    converter.listener = LiveListener(Console(file=screen, width=200), summary=False)
    converter.fit()
    assert re.search(r"TopK: FP16 \S+, target \S+ \(at most 1 % below FP16\)", screen.getvalue())


def test_int8_of_a_half_precision_model_is_compared_with_the_model_as_given(tmp_path):
    """A changed PyTorch model computes in float32 where not lowered, and the table says so."""
    model = _torch_net(torch.bfloat16)
    converter = MixedPrecision(precisions="int8", cache=False, op_wise={"2": "fp32"})
    converter.model = model
    converter.calib_dataloader = [(torch.randn(8, WIDTHS[0]).bfloat16(), torch.zeros(8))]
    converter.exit_policy = ExitPolicy(performance_only=True)
    result = converter.fit()
    assert result.report.op_counts["linear"] == {"int8": 1, "fp32": 1}
    assert result.report.baseline_size == WEIGHTS * 2
    assert "BF16" in _shown(result.report, result.met)
    result.save_plan(tmp_path / "plan.yaml")
    loaded = PrecisionPlan.load(tmp_path / "plan.yaml")
    assert loaded == result.plan
    assert loaded.source_precisions == (BF16,)


def test_a_record_of_the_run_keeps_the_precision(tmp_path):
    converter = _unchanged(_onnx_net(), np.float16)
    report = converter.fit().report
    report.save_html(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "below FP16" in page
    assert "below FP32" not in page
    (link,) = re.findall(r'href="data:text/yaml;base64,([^"]+)"', page)
    assert PrecisionPlan.from_yaml(base64.b64decode(link).decode()).source_precisions == (FP16,)


def test_the_precision_of_most_weights_comes_first_and_traces_are_left_out():
    ops = [
        Op("a", "conv", weights=600, source_precision=BF16),
        Op("b", "conv", weights=400),
        Op("c", "conv", weights=2, source_precision=FP16),
    ]
    assert OpGraph(ops).source_precisions == (BF16, FP32)
    assert OpGraph(ops).source_name == "BF16/FP32"
    assert OpGraph([]).source_precisions == (FP32,)


def test_ops_of_a_changed_plan_keep_their_precision_unless_widened():
    ops = [Op("a", "conv"), Op("b", "conv", source_precision=BF16)]
    graph = OpGraph([*ops, Op("c", "conv", source_precision=BF16, widened=True)])
    untouched = dict.fromkeys("abc", FP32)
    assert graph.executed(untouched) == {"a": FP32, "b": BF16, "c": BF16}
    lowered = {**untouched, "a": Precision.INT8}
    assert graph.executed(lowered) == {"a": Precision.INT8, "b": BF16, "c": FP32}


def test_a_plan_file_with_an_unknown_source_precision_is_refused():
    text = "neural_mp_plan: 2\nsource_precisions: [fp15]\nops: {}\n"
    with pytest.raises(PlanError, match="source_precisions"):
        PrecisionPlan.from_yaml(text)


def test_inspection_names_the_precision_of_the_model(tmp_path):
    onnx.save(_onnx_net(), tmp_path / "half.onnx")
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(tmp_path / "half.onnx")
    console = Console(file=io.StringIO(), width=120)
    console.print(build_capability_table(adaptor.space(model, machine())))
    assert "the model is in FP16" in console.file.getvalue()
