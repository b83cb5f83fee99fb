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


def test_a_model_with_three_outputs_is_tuned_by_the_miou_of_one(copies):
    folder = copies / "segmentation_onnx"
    printed = run_script(folder / "tune.py")
    assert "The accuracy target is met" in printed
    assert "mask (4, 3, 16, 16), edges (4, 2, 16, 16), digit (4, 10)" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.report.metric == "MeanIoU"
    assert 0.99 * tuned.report.baseline_accuracy <= tuned.report.accuracy
    assert 0.5 < tuned.report.baseline_accuracy < 1
    run_command(
        folder, "tune", "conf.yaml", "--output", "out/from_yaml", "--objective", "modelsize"
    )
    from_yaml = neural_mp.load(folder / "out" / "from_yaml")
    assert from_yaml.met
    assert list(from_yaml.report.metrics) == ["miou", "accuracy"]
    for metric in from_yaml.report.metrics.values():
        assert metric.target == pytest.approx(0.99 * metric.baseline)
        assert metric.value >= metric.target


def test_a_detector_is_tuned_by_its_map_from_a_file(copies):
    folder = copies / "detection_yolo"
    printed = run_script(folder / "tune.py")
    assert "The accuracy target is met" in printed
    assert re.search(r"objects of an image: \[[\d, ]*\], in truth \[", printed)
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.report.baseline_accuracy > 0.4
    assert tuned.report.accuracy >= 0.99 * tuned.report.baseline_accuracy
    convs = [op.precision.is_integer for op in tuned.planned.values() if op.type == "Conv"]
    assert sum(convs) >= 0.85 * len(convs)


def test_moving_ops_between_lists_changes_what_the_readme_says(copies, monkeypatch):
    folder = copies / "tune_lists"
    printed = run_script(folder / "tune_lists.py")
    casts = re.findall(r"Converted (\d+)/15 nodes to bfloat16 using (\d+) casts", printed)
    assert casts == [("10", "4"), ("12", "8"), ("15", "2")]
    assert "INFER, denied: downstream of Pow" in printed
    assert re.search(r"AvgPool and Softmax allowed .* AvgPool, Softmax ", printed)
    monkeypatch.setenv("FORCE_BF16", "1")  # as the command of the README
    printed = run_command(folder, "tune", "conf.yaml")
    assert "Converted 12/15 nodes to bfloat16 using 8 casts" in printed
    assert (folder / "out" / "log" / "from_yaml" / "after.pb").is_file()
    printed = run_command(folder, "explain", "net:trained", "Identity", "--precision", "bf16")
    assert "CLEAR, allowed: downstream of MatMul" in printed


def test_a_table_is_learned_and_tuned_from_the_command_line_alone(copies):
    folder = copies / "csv_regression"
    command = Path(sys.executable).parent / "neural-mp"  # as it is installed
    printed = run_script(folder / "train.py")
    trained = float(re.search(r"RMSE ([\d.]+) on 100 rows", printed)[1])
    result = json.loads(run_command(folder, "tune", "conf.yaml", "-o", "out/tuned", "--json"))
    report = result["report"]
    assert result["met"]
    assert report["metric"] == "RMSE"
    assert not report["higher_is_better"]
    assert report["baseline_accuracy"] == pytest.approx(trained, abs=0.01)
    assert trained < 65  # the mean of the rows trained on is off by 71
    assert report["accuracy"] <= 1.01 * report["baseline_accuracy"]
    assert report["size"] < 0.3 * report["baseline_size"]
    assert "int8" in run_process(folder, command, "inspect", "out/tuned", "--summary")
