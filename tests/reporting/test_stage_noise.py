"""Noise before and after recovery is shown in tables, pages, JSON and `explain`."""

import json
from dataclasses import replace

import pytest
from command_here import run_main
from page_records import chain, record
from rich.console import Console

from neural_mp.core.plan import PrecisionPlan
from neural_mp.errors import NeuralMPError
from neural_mp.reporting import result_tables
from neural_mp.reporting.page import page_of
from neural_mp.reporting.tables import format_stage_levels, stage_noise_table
from neural_mp.runs.record_schema import record_from_dict, record_to_dict, write_record
from neural_mp.runs.report import Report, Stage, StageNoise

NOISE = StageNoise(
    {
        "op0": {"nearest": 0.1, "reconstructed": 0.01, "trained": 0.001},
        "op3": {"nearest": 0.5, "reconstructed": 0.25, "trained": 0.0},
    },
    {"nearest": 0.2, "reconstructed": 0.02, "trained": 0.002},
    64,
)


def text_of(table):
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def run_record():
    run = record(chain(12))
    report = replace(run.ending.report, stage_noise=NOISE)
    return replace(run, ending=replace(run.ending, report=report))


def test_tables_have_the_sqnr_of_each_stage():
    text = text_of(result_tables(run_record().ending.report, True))
    (row,) = [line for line in text.splitlines() if "op0" in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == [
        "op0",
        "10.0 dB",
        "20.0 dB",
        "30.0 dB",
    ]
    assert "after training" in text
    assert "equal" in text
    assert "outputs" in text


def test_a_table_has_the_noisiest_ops_in_the_order_of_the_model():
    ops = {f"op{i}": {"nearest": (i * 7 % 30) / 100} for i in range(30)}
    text = text_of(stage_noise_table(StageNoise(ops, {"nearest": 0.1}, 8)))
    rows = [line.split("│")[1].strip() for line in text.splitlines() if "│ op" in line]
    noisiest = sorted(ops, key=lambda op: -ops[op]["nearest"])[:12]
    assert rows == [op for op in ops if op in noisiest]
    assert "12 noisiest of 30 ops" in text


def test_a_page_has_every_op():
    page = page_of(run_record())
    assert "Noise before and after recovery" in page
    assert "op3</th><td>3.0 dB</td><td>6.0 dB</td><td>equal</td>" in page
    assert "Noise before and after recovery" not in page_of(record(chain(12)))


def test_a_report_and_a_record_keep_the_noise():
    report = run_record().ending.report
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["stage_noise"]["ops"]["op3"]["trained"] == 0
    assert Report.from_dict(stored).stage_noise == NOISE
    assert record_from_dict(record_to_dict(run_record())).ending.report.stage_noise == NOISE
    stored["stage_noise"]["ops"]["op3"]["trained"] = -1
    with pytest.raises(NeuralMPError, match="from 0, found -1"):
        Report.from_dict(stored)


def test_an_op_is_described_in_a_sentence():
    assert NOISE.measured_stages == tuple(Stage)
    expected = "10.0 dB rounded to nearest, 20.0 dB after reconstruction, 30.0 dB after training"
    assert format_stage_levels(NOISE, "op0") == expected
    assert format_stage_levels(NOISE, "op1") == ""


@pytest.mark.slow
def test_explain_has_the_noise_and_the_plan_of_a_run(tmp_path, monkeypatch):
    """A saved record of a run with the ops of a file, as the result of a run has."""
    onnx = pytest.importorskip("onnx")
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    monkeypatch.chdir(tmp_path)
    weight = numpy_helper.from_array(np.ones((4, 3, 1, 1), np.float32), "weight")
    image = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 4])
    node = helper.make_node("Conv", ["x", "weight"], ["y"], "op0")
    graph = helper.make_graph([node], "net", [image], [out], [weight])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), "net.onnx")
    saved = tmp_path / "saved"
    saved.mkdir()
    run = run_record()
    plan = PrecisionPlan.from_dict({"op0": "fp32"})
    ended = replace(run.ending, plan=plan)
    write_record(saved / "run.json.gz", replace(run, ending=ended, trials=()))
    code, output, _ = run_main("explain", "net.onnx", "op0", "--workspace", "saved")
    assert code == 0
    assert "SQNR of its result against FP32: 10.0 dB rounded to nearest" in output
    assert "is set to fp32 by the plan" in " ".join(output.split())
    _, output, _ = run_main("explain", "net.onnx", "op0", "--workspace", "saved", "--json")
    assert json.loads(output)["stage_noise"] == NOISE.ops["op0"]
    code, _, why = run_main(
        "explain", "net.onnx", "op0", "--workspace", "saved", "--plan", "plan.yaml"
    )
    assert code == 2
    assert "--plan or --workspace" in why
    _, output, _ = run_main("explain", "net.onnx", "op0", "--json")
    assert json.loads(output)["stage_noise"] is None
