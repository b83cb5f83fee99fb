"""The examples run from their own folders, as their READMEs say."""

import json
import re
import sys
from pathlib import Path

import pytest
from examples_here import copied_to, run_command, run_process, run_script

import neural_mp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return copied_to(tmp_path_factory.mktemp("examples"))


@pytest.fixture(scope="module", params=["pytorch_digits", "tensorflow_digits", "onnx_digits"])
def digits_example(request, copies):
    """A copy of the example, run from Python once."""
    folder = copies / request.param
    return folder, run_script(folder / "tune.py")


def test_a_classifier_of_transformers_is_tuned_by_its_f1_and_runs_in_a_process_of_its_own(copies):
    pytest.importorskip("transformers")
    folder = copies / "huggingface_text"
    printed = run_script(folder / "tune.py")
    assert "The accuracy target is met" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.report.baseline_accuracy > 0.8
    assert tuned.report.accuracy >= 0.99 * tuned.report.baseline_accuracy
    assert tuned.plan.counts()["int8"] >= 13
    assert tuned.plan["classifier"].precision is neural_mp.Precision.FP32
    assert re.search(r"topics: \[\d, \d\]", run_process(folder, sys.executable, "use.py"))


def test_a_saved_model_in_bf16(copies):
    """Every node, with two casts; and the outputs keep their type."""
    folder = copies / "saved_model_bf16"
    printed = run_script(folder / "convert.py")
    converted, nodes, casts = re.search(
        r"Converted (\d+)/(\d+) nodes to bfloat16 using (\d+) casts", printed
    ).groups()
    assert (converted, casts) == (nodes, "2")
    assert "outputs are float32, and within" in printed
    assert neural_mp.load(folder / "out" / "bf16").plan.counts() == {"bf16": int(nodes)}


def test_a_model_with_three_outputs_is_tuned_by_the_miou_of_one(copies):
    folder = copies / "segmentation_onnx"
    printed = run_script(folder / "tune.py")
    assert "The accuracy target is met" in printed
    assert "mask (4, 3, 16, 16), edges (4, 2, 16, 16), digit (4, 10)" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.report.metric == "MeanIoU"
    assert 0.99 * tuned.report.baseline_accuracy <= tuned.report.accuracy
    assert 0.5 < tuned.report.baseline_accuracy < 1
    run_command(folder, "tune", "conf.yaml", "--output", "out/from_yaml")
    from_yaml = neural_mp.load(folder / "out" / "from_yaml")
    assert from_yaml.met
    assert list(from_yaml.report.metrics) == ["miou", "accuracy"]
    for found in from_yaml.report.metrics.values():
        assert found.target == pytest.approx(0.99 * found.baseline)
        assert found.value >= found.target


def test_moving_ops_between_lists_changes_what_the_readme_says(copies):
    folder = copies / "tune_lists"
    printed = run_script(folder / "tune_lists.py")
    casts = re.findall(r"Converted (\d+)/15 nodes to bfloat16 using (\d+) casts", printed)
    assert casts == [("10", "4"), ("12", "8"), ("15", "2")]
    assert "INFER, denied: downstream of Pow" in printed
    assert re.search(r"AvgPool and Softmax allowed .* AvgPool, Softmax ", printed)
    printed = run_command(folder, "tune", "conf.yaml")
    assert "Converted 12/15 nodes to bfloat16 using 8 casts" in printed
    assert (folder / "out" / "log" / "from_yaml" / "after.pb").is_file()
    printed = run_command(folder, "explain", "net:trained", "Identity", "--precision", "bf16")
    assert "CLEAR, allowed: downstream of MatMul" in printed


def test_the_python_example_meets_its_target_with_int8_ops(digits_example):
    folder, printed = digits_example
    assert "The accuracy target is met" in printed
    assert "int8" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.met
    assert tuned.plan.counts()["int8"] >= 7
    assert tuned.report.accuracy >= 0.99 * tuned.report.baseline_accuracy
    assert "Target met" in (folder / "out" / "tuned" / "report.html").read_text("utf-8")
    assert "the plan holds" in run_command(folder, "audit", "out/tuned")


def test_the_yaml_example_finds_the_same(digits_example):
    folder, _ = digits_example
    run_command(folder, "tune", "conf.yaml", "--output", "out/from_yaml")
    from_python, from_yaml = (
        json.loads((folder / "out" / name / "neural_mp.json").read_text())
        for name in ("tuned", "from_yaml")
    )
    assert from_yaml["met"]
    # Of two plans that are about as fast, either may be taken; one plan has one accuracy.
    yaml, python = from_yaml["report"], from_python["report"]
    if yaml["op_counts"] == python["op_counts"]:
        assert yaml["accuracy"] == python["accuracy"]
    assert yaml["baseline_accuracy"] == python["baseline_accuracy"]
    assert yaml["size"] < 0.5 * yaml["baseline_size"]


def test_a_table_is_learned_and_tuned_from_the_command_line_alone(copies):
    folder = copies / "csv_regression"
    command = Path(sys.executable).parent / "neural-mp"
    printed = run_process(folder, sys.executable, "train.py")
    trained = float(re.search(r"RMSE ([\d.]+) on 100 rows", printed)[1])
    found = json.loads(
        run_process(folder, command, "tune", "conf.yaml", "-o", "out/tuned", "--json")
    )
    report = found["report"]
    assert found["met"]
    assert report["metric"] == "RMSE"
    assert not report["higher_is_better"]
    assert report["baseline_accuracy"] == pytest.approx(trained, abs=0.01)
    assert trained < 65  # the mean of the rows trained on is off by 71
    assert report["accuracy"] <= 1.01 * report["baseline_accuracy"]
    assert report["size"] < 0.3 * report["baseline_size"]
    assert "int8" in run_command(folder, "inspect", "out/tuned", "--summary")
