"""Widths of an op on an accelerator, explained by rules, plans and measured noise."""

import json
from dataclasses import replace

import onnx
import pytest
from command_here import run_main
from onnx_nets import as_onnx

from neural_mp import MixedPrecision
from neural_mp.api.explain_widths import Decision, explain_widths
from neural_mp.api.loading import load_source
from neural_mp.core.observations import TensorNoise, WidthFigures
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, PlanError
from neural_mp.runs.report import AcceleratorFigures, Report

W8A16 = OpConfig(
    Precision.INT16,
    QuantSpec("int8", "symmetric", "per_channel"),
    QuantSpec("uint16", "asymmetric", "per_tensor"),
)
NOISE = {"w8a8": 24.04, "w8a16": 55.0}


def small_graph():
    """Conv, Log, Reshape and ArgMax: of all widths, of 8 bits, without own ones, and float."""
    text = """
    <ir_version: 9, opset_import: ["" : 21]>
    net (float[N, 2, 4, 4] x) => (int64[N, 1] y)
    <float[3, 2, 1, 1] w = {1, 2, 3, 4, 5, 6}, int64[2] flat = {-1, 48}>
    {
      [conv] c = Conv(x, w)
      [abs] a = Abs(c)
      [log] l = Log(a)
      [reshape] r = Reshape(l, flat)
      [argmax] y = ArgMax <axis = 1> (r)
    }
    """
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model)
    return model


@pytest.fixture
def loaded():
    return load_source(small_graph(), None, None)


def decisions(rows):
    return {widths: row.decision.value for widths, row in rows.items()}


def test_rows_are_the_widths_of_the_kind_of_op(loaded):
    op, rows = explain_widths(loaded, "conv", "qnn")
    assert op.type == "Conv"
    offered = dict.fromkeys(("w4a16", "w8a16", "w16a16", "float"), "offered")
    assert rows["w4a16"].reason == "for plans alone: wider ones cost no more"
    assert decisions(rows) == {"w8a8": "runs", **offered}
    assert rows["w8a8"].reason == "the narrowest width offered; no plan was given"
    _, rows = explain_widths(loaded, "log", "qnn")
    assert decisions(rows) == {"a8": "runs", "a16": "not offered", "float": "offered"}
    assert "does not compute Log in 16 bits" in rows["a16"].reason


def test_op_that_stays_in_float_has_the_reason_of_the_profile(loaded):
    _, rows = explain_widths(loaded, "argmax", "qnn")
    assert set(decisions(rows).values()) == {"not offered", "runs"}
    assert rows["float"].decision is Decision.RUNS
    assert rows["a8"].reason == "computed in float by the NPU"


def test_op_that_moves_values_follows_the_op_before(loaded):
    _, rows = explain_widths(loaded, "reshape", "qnn")
    assert set(decisions(rows).values()) == {"follows"}


def test_plan_and_noise_are_the_reason_for_a_wider_width(loaded):
    plan = PrecisionPlan({"conv": W8A16})
    _, rows = explain_widths(loaded, "conv", "qnn", plan)
    assert rows["w8a16"].reason == "widened by the plan"
    assert rows["w8a8"].reason == "the plan has w8a16"
    figures = AcceleratorFigures("qnn", "QNN", "measured", 0.5, sqnr_db={"conv": NOISE})
    _, rows = explain_widths(loaded, "conv", "qnn", plan, Report(accelerator=figures))
    expected = "in w8a8 the outputs of the model lose to 24.0 dB by its tensors and weight alone"
    assert rows["w8a16"].reason == f"widened by the search: {expected}"
    assert rows["w8a16"].decision is Decision.RUNS
    assert rows["w8a8"].sqnr_db == 24.04
    assert rows["w16a16"].sqnr_db is None


def test_plan_that_the_target_cannot_run_is_an_error(loaded):
    plan = PrecisionPlan({"conv": W8A16})
    with pytest.raises(PlanError, match="TensorRT does not compute Conv in 16 bits"):
        explain_widths(loaded, "conv", "tensorrt", plan)
    with pytest.raises(ConfigurationError, match="got the CPU 'portable'"):
        explain_widths(loaded, "conv", "portable")


def test_noise_of_an_op_is_that_of_its_tensors_and_weight():
    figures = WidthFigures(
        (TensorNoise("a", ("conv", "add"), {"8": 1e-3}), TensorNoise("b", ("add",), {"8": 1e-1})),
        {"conv": {"8": 2e-3}},
    )
    activation = QuantSpec("uint8", "asymmetric", "per_tensor")
    eight = OpConfig(Precision.INT8, W8A16.weight, activation)
    assert figures.op_noise("conv", eight) == pytest.approx(3e-3)
    assert figures.op_noise("conv", W8A16) == pytest.approx(2e-3)  # 16 bits were not measured


def test_report_keeps_the_noise_and_reads_files_without():
    figures = AcceleratorFigures("qnn", "QNN", "measured", 0.5, sqnr_db={"conv": NOISE})
    stored = json.loads(json.dumps(Report(accelerator=figures).to_dict()))
    assert stored["accelerator"]["sqnr_db"] == {"conv": NOISE}
    assert Report.from_dict(stored).accelerator == figures
    del stored["accelerator"]["sqnr_db"]
    assert Report.from_dict(stored).accelerator == replace(figures, sqnr_db={})


def test_command_refuses_precisions_of_cpus(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(small_graph(), "net.onnx")
    code, output, _ = run_main("explain", "net.onnx", "conv", "--target", "qnn")
    assert code == 0
    assert "the narrowest width offered" in output
    code, _, errors = run_main(
        "explain", "net.onnx", "conv", "--target", "qnn", "--precision", "int8"
    )
    assert code == 2
    assert "remove --precision" in errors


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_workspace_of_a_search_explains_its_widths_with_noise(
    hostile_net, digits, tmp_path, monkeypatch
):
    """One channel of activations is 1024 times larger than the others."""
    monkeypatch.chdir(tmp_path)
    images, labels = digits[1].images[:500], digits[1].labels[:500]
    data = [(images[s : s + 100], labels[s : s + 100]) for s in range(0, 500, 100)]
    onnx.save(as_onnx(hostile_net), "net.onnx")
    result = MixedPrecision(
        model="net.onnx",
        target="qnn",
        metric="accuracy",
        eval_dataloader=data,
        accuracy_criterion={"absolute": 0.0},
        workspace="runs",
    )()
    result.save("saved")
    widened = next(op for op, config in result.plan.items() if config.precision == "int16")
    noise = result.report.accelerator.sqnr_db[widened]
    for folder in ("runs", "saved"):
        arguments = ("explain", "net.onnx", widened, "--workspace", folder)
        code, output, errors = run_main(*arguments, "--json")
        assert code == 0, errors
        document = json.loads(output)
        assert document["target"] == "qnn"
        (row,) = [row for row in document["widths"].values() if row["decision"] == "runs"]
        assert row["reason"].startswith("widened by the search: in ")
        assert "dB by its tensors" in row["reason"]
        measured = {w: row["sqnr_db"] for w, row in document["widths"].items() if row["sqnr_db"]}
        assert measured == pytest.approx(noise)
