"""`explain` finds ops by the names of `op_wise`, and says the same as `inspect`."""

from __future__ import annotations

import json

import dense_runs
import pytest
from machine import machine

from neural_mp.core import hardware
from neural_mp.core.precision import Precision


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workplace as the working directory, on a CPU without 16 bits."""
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path))
    monkeypatch.setattr(hardware, "detect", lambda: machine(Precision.INT8))
    return tmp_path


def test_a_precision_that_the_cpu_lacks_is_not_allowed(here, run):
    _, out, _ = run("inspect", "net.onnx", "--json")
    (row,) = (row for row in json.loads(out) if row["name"] == "head")
    code, out, err = run("explain", "net.onnx", "head", "--json")
    assert code == 0, err
    decisions = json.loads(out)["precisions"]
    for precision in ("bf16", "fp16"):
        assert (precision in row["precisions"]) is (decisions[precision]["decision"] == precision)
    assert decisions["fp16"]["decision"] == "fp32"
    assert decisions["fp16"]["reason"].startswith("CPU has none of")
    assert "set by the plan" not in decisions["int8"]["reason"]


@pytest.mark.parametrize("name", ["head", "hea.", "first|head"])
def test_names_are_those_of_op_wise(here, run, name):
    code, out, err = run("explain", "net.onnx", name, "--json")
    assert code == 0, err
    assert json.loads(out)["op"] in ("head", "first")
    assert json.loads(out)["type"] == "MatMul"


def test_a_miss_names_the_nearest(here, run):
    code, _, err = run("explain", "net.onnx", "haed")
    assert code == 2
    assert "did you mean 'head'" in err
