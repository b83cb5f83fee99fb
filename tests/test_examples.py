"""The examples run from their own folders, as their READMEs say."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import neural_mp

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def digits_example(tmp_path_factory):
    """A copy of the example, run from Python once."""
    folder = tmp_path_factory.mktemp("examples") / "pytorch_digits"
    shutil.copytree(EXAMPLES / "pytorch_digits", folder, ignore=shutil.ignore_patterns("out"))
    result = subprocess.run(
        [sys.executable, "tune.py"], cwd=folder, check=True, capture_output=True, text=True
    )
    return folder, result.stdout


def test_the_python_example_meets_its_target_with_int8_ops(digits_example):
    folder, printed = digits_example
    assert "The accuracy target is met" in printed
    assert "int8" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.met
    assert tuned.plan.counts()["int8"] >= 7
    assert tuned.report.accuracy >= 0.99 * tuned.report.baseline_accuracy


def test_the_yaml_example_finds_the_same(digits_example):
    folder, _ = digits_example
    command = Path(sys.executable).parent / "neural-mp"
    subprocess.run(
        [command, "tune", "conf.yaml", "--output", "out/from_yaml"],
        cwd=folder,
        check=True,
        capture_output=True,
    )
    from_python, from_yaml = (
        json.loads((folder / "out" / name / "neural_mp.json").read_text())
        for name in ("tuned", "from_yaml")
    )
    assert from_yaml["met"]
    assert from_yaml["report"]["accuracy"] == from_python["report"]["accuracy"]
    assert from_yaml["report"]["op_counts"] == from_python["report"]["op_counts"]
