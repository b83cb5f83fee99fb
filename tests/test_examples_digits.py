"""The examples that tune nets of digits run from their own folders, as their READMEs say."""

import json
import re
from functools import cache

import pytest
import yaml
from cli_samples import headings, sample_of
from examples_here import copied_to, run_command, run_script

import neural_mp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return copied_to(tmp_path_factory.mktemp("examples"))


_FOLDERS = ["pytorch_digits", "tensorflow_digits", "onnx_digits", "litert_digits"]


@pytest.fixture(scope="module", params=_FOLDERS)
def digits_example(request, copies):
    """A copy of the example, run from Python once."""
    folder = copies / request.param
    return folder, run_script(folder / "tune.py")


@pytest.fixture(scope="module")
def tuned_by_yaml(copies):
    """Return the folder and the printed text of `tune conf.yaml` in an example, run once."""

    @cache
    def tuned(example):
        folder = copies / example
        return folder / "tuned", run_command(folder, "tune", "conf.yaml", "-o", "tuned")

    return tuned


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


def test_the_python_example_meets_its_target_with_int8_ops(digits_example):
    folder, printed = digits_example
    assert "The accuracy target is met" in printed
    assert "int8" in printed
    tuned = neural_mp.load(folder / "out" / "tuned")
    assert tuned.met
    # Which ops gain time in INT8 is measured, here on a machine that runs other tests as well.
    assert tuned.plan.counts()["int8"] >= 2
    assert tuned.report.accuracy >= 0.99 * tuned.report.baseline_accuracy
    assert "Target met" in (folder / "out" / "tuned" / "report.html").read_text("utf-8")
    assert "the plan holds" in run_command(folder, "audit", "out/tuned")


#: Commands of the documentation with outputs as samples, and how many of their first tables have
#: the same columns on every machine; None for all.
SAMPLES = {
    "tune conf.yaml -o tuned": 1,
    "convert digits:trained_net --plan edited.yaml --output edited --input-shape 32,1,8,8": 1,
    "audit tuned --all": None,
    "benchmark digits:trained_net tuned edited --input-shape 2,1,8,8 --batch-size 32": None,
    "compare digits:trained_net tuned --data conf.yaml": None,
    "sensitivity digits:trained_net --data conf.yaml --precision int8": None,
}


def test_samples_of_the_command_line_have_the_columns_of_their_outputs(copies, tuned_by_yaml):
    folder = copies / "pytorch_digits"
    tuned, printed = tuned_by_yaml("pytorch_digits")
    plan = yaml.safe_load((tuned / "plan.yaml").read_text("utf-8"))
    plan["ops"]["block2.conv1"] = "fp32"
    (folder / "edited.yaml").write_text(yaml.safe_dump(plan), "utf-8")
    for command, count in SAMPLES.items():
        is_tune = command.startswith("tune")
        actual = headings(printed if is_tune else run_command(folder, *command.split()))
        expected = headings(sample_of(command))
        assert expected, command
        assert actual[:count] == expected[:count], command


def test_the_yaml_example_finds_the_same(digits_example, tuned_by_yaml):
    folder, _ = digits_example
    from_python, from_yaml = (
        json.loads((path / "neural_mp.json").read_text())
        for path in (folder / "out" / "tuned", tuned_by_yaml(folder.name)[0])
    )
    assert from_yaml["met"]
    # Of two plans that are about as fast, either may be taken; one plan has one accuracy.
    yaml, python = from_yaml["report"], from_python["report"]
    if yaml["op_counts"] == python["op_counts"]:
        assert yaml["accuracy"] == python["accuracy"]
    assert yaml["baseline_accuracy"] == python["baseline_accuracy"]
    assert yaml["size"] < 0.5 * yaml["baseline_size"]
