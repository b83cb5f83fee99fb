"""Tuning by options alone, tuning files written for a model, reports without a workspace."""

from __future__ import annotations

import json
import webbrowser

import dense_runs
import numpy as np
import pytest

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.api.tuning_source import parse_criterion_option
from neural_mp.config import load_settings, parse_settings, settings_to_yaml
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ConfigurationError, DataError

pytestmark = pytest.mark.usefixtures("quick_runs")
#: What a tuning file says in `dense_runs.CONF`.
OPTIONS = ("--metric", "accuracy", "--tolerance", "5%", "--precisions", "int8")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workplace as the working directory."""
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path))
    return tmp_path


def _tune(run, *options: str, code: int = 0) -> dict:
    status, out, err = run(
        "tune",
        "net.onnx",
        "--objective",
        "modelsize",
        "--runtime",
        "source",
        "--json",
        *options,
    )
    assert status == code, err
    return json.loads(out)


def test_a_model_is_tuned_by_options_alone(here, run):
    document = _tune(run, "--data", "test.npz", *OPTIONS, "--batch-size", "40")
    assert document["met"]
    assert document["report"]["target"] == pytest.approx(0.95)
    assert {config["precision"] for config in document["plan"].values()} <= {"int8", "fp32"}


def test_options_override_the_tuning_file(here, run):
    code, out, err = run("tune", "conf.yaml", "--tolerance", "absolute:0.2", "--json")
    assert code == 0, err
    assert json.loads(out)["report"]["target"] == pytest.approx(0.8)


def test_limits_apply(here, run):
    code, _, err = run("tune", "conf.yaml", "--max-trials", "1", "--timeout", "0.000001")
    assert code in (0, 1), err
    assert MixedPrecision("conf.yaml").exit_policy.max_trials == 100
    code, _, err = run("tune", "conf.yaml", "--max-trials", "0")
    assert code == 2
    assert "max_trials must be a whole number from 1" in err


@pytest.mark.parametrize("name", ["y_test", "odd"])
def test_labels_are_found_by_name_or_by_option(here, run, name):
    data = dict(np.load(here / "test.npz"))
    np.savez(here / "other.npz", **{"x_test": data["inputs"], name: data["labels"]})
    label = () if name == "y_test" else ("--label", name)
    assert _tune(run, "--data", "other.npz", *OPTIONS, *label)["met"]
    if label:
        code, _, err = run("tune", "net.onnx", "--data", "other.npz", *OPTIONS)
        assert code == 2
        assert "name the labels by --label" in err


def test_a_csv_file_is_data(here, run):
    data = dict(np.load(here / "test.npz"))
    rows = np.column_stack([data["inputs"], data["labels"]])
    header = ",".join([*(f"f{i}" for i in range(dense_runs.FEATURES)), "class"])
    np.savetxt(here / "test.csv", rows, "%.9g", ",", header=header, comments="")
    document = _tune(run, "--data", "test.csv", "--label", "class", *OPTIONS)
    assert document["report"]["baseline_accuracy"] == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("net.onnx",), "requires --data FILE and --metric NAME"),
        (("nett.onnx", "--data", "test.npz", "--metric", "accuracy"), "there is no model"),
        (("net.onnx", "--data", "none.npz", *OPTIONS), "there is no file 'none.npz'"),
        (("net.onnx", "--data", "conf.yaml", *OPTIONS), "an .npz or a .csv file"),
        (("conf.yaml", "--label", "y"), "require --data"),
        (("conf.yaml", "--tolerance", "absolute:2%"), "write relative: 2%"),
        (("conf.yaml", "--tolerance", "absolut:2"), "did you mean 'absolute'"),
    ],
)
def test_mistakes_are_named(here, run, arguments, words):
    code, _, err = run("tune", *arguments)
    assert code == 2
    assert words in err


@pytest.mark.parametrize(
    ("text", "tolerance", "relative"),
    [("1%", 0.01, True), ("0.01", 0.01, True), ("relative:0.02", 0.02, True),
     ("absolute:0.3", 0.3, False)],
)  # fmt: skip
def test_a_tolerance_as_text(text, tolerance, relative):
    default = AccuracyCriterion(higher_is_better=False)
    assert parse_criterion_option(text, default) == AccuracyCriterion(tolerance, relative, False)


def test_init_writes_a_file_that_tunes(here, run):
    code, _, err = run("init", "net.onnx", "--data", "test.npz", "-o", "new.yaml")
    assert code == 0, err
    text = (here / "new.yaml").read_text()
    assert "Inputs: float32 [1, 16]; outputs: float32 [1, 4]" in text
    assert "2 MatMul" in text
    line = next(row for row in text.splitlines() if "Precisions on this machine" in row)
    assert "int8 2" in line
    assert "int3" not in line  # ONNX Runtime has no kernel for 3 bits
    settings = load_settings("new.yaml")
    assert settings.options.model == "net.onnx"
    assert [metric.name for metric in settings.evaluation.metrics] == ["accuracy"]
    code, _, err = run("tune", "new.yaml", "--objective", "modelsize", "--runtime", "source")
    assert code == 0, err
    code, _, err = run("init", "net.onnx", "-o", "new.yaml")
    assert code == 2
    assert "exists already" in err
    assert (here / "new.yaml").read_text() == text


def test_report_opens_the_page_and_needs_no_workspace(here, run, monkeypatch):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    conf = (here / "conf.yaml").read_text()
    storage = f"sqlite:///{here}/runs.db"
    (here / "conf.yaml").write_text(conf.replace("tuning:", f"tuning:\n  storage: {storage}"))
    assert run("tune", "conf.yaml")[0] == 0
    code, out, err = run("report", "--storage", storage, "-o", "one.html", "--open")
    assert code == 0, err
    assert "met its target" in out
    assert opened == [(here / "one.html").resolve().as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert "no browser is available" in run("report", "--storage", storage, "--open")[2]
    code, _, err = run("report")
    assert code == 2
    assert "neural_mp_workspace" in err


def _dicts(key: str) -> list[dict]:
    x = np.random.default_rng(1).normal(size=(100, dense_runs.FEATURES)).astype("float32")
    labels = dense_runs.scores(x).argmax(1)
    return [{"x": x[i : i + 50], key: labels[i : i + 50]} for i in (0, 50)]


def _by_key(**options):
    return MixedPrecision(
        model="net.onnx", metric="accuracy", precisions="int8", objective="modelsize",
        accuracy_criterion=0.05, **options,
    )  # fmt: skip


def test_a_label_key_names_the_labels_of_dict_batches(here):
    tuned = _by_key(eval_dataloader=_dicts("truth"), label_key="truth")()
    assert tuned.met
    assert tuned.report.baseline_accuracy == 1
    with pytest.raises(DataError, match="set label_key for another"):
        _by_key(eval_dataloader=_dicts("truth"))()
    with pytest.raises(DataError, match="did you mean 'truth'"):
        _by_key(eval_dataloader=_dicts("truth"), label_key="truht")()


def test_a_result_takes_the_batches_of_its_run_also_after_loading(here):
    (batch, _) = _dicts("truth")
    tuned = _by_key(eval_dataloader=_dicts("truth"), label_key="truth")()
    expected = tuned({"x": batch["x"]})
    tuned.save("tuned")
    for result in (tuned, neural_mp.load("tuned")):
        np.testing.assert_array_equal(result(batch), expected)
        np.testing.assert_array_equal(result(**batch), expected)
    assert set(batch) == {"x", "truth"}


def test_a_metric_that_eval_func_replaces_is_named_in_a_warning(here):
    tuned = _by_key(
        eval_func=lambda model: 1.0, calib_dataloader=_dicts("truth"), label_key="truth"
    )()
    (warning,) = [line for line in tuned.report.warnings if "eval_func" in line]
    assert warning.startswith("metric is not used, as eval_func replaces the metric")


def test_a_label_key_in_yaml():
    settings = parse_settings("evaluation: {accuracy: {label_key: truth, metric: accuracy}}")
    assert MixedPrecision(settings).label_key == "truth"
    assert parse_settings(settings_to_yaml(settings)) == settings
    with pytest.raises(ConfigurationError, match="label_key"):
        MixedPrecision(label_key=3, model="net.onnx")()
