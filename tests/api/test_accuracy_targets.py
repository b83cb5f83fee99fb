"""Tolerances that mean something else than they seem to, and baselines that cannot be right."""

from __future__ import annotations

import logging

import dense_runs
import numpy as np
import pytest

from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.errors import ConfigurationError, MetricError

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workplace as the working directory."""
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path))
    return tmp_path


def _with_criterion(folder, text: str) -> None:
    conf = (folder / "conf.yaml").read_text()
    (folder / "conf.yaml").write_text(conf.replace("{relative: 0.05}", text))


def test_an_absolute_tolerance_of_half_an_accuracy_is_refused_with_its_target(here, run):
    _with_criterion(here, "{absolute: 0.5}")
    code, _, err = run("tune", "conf.yaml")
    assert code == 2
    assert "got 0.5 with Accuracy 1 in FP32, i.e. a target of 0.5" in err
    assert "trial 1" not in err


def test_the_same_tolerance_is_accepted_on_demand(here, run):
    _with_criterion(here, "{absolute: 0.5, any_tolerance: true}")
    code, _, err = run("tune", "conf.yaml")
    assert code == 0, err
    assert "Accuracy: FP32 1, target 0.5 (at most 0.5 below FP32)" in err


def test_python_refuses_it_too(here):
    converter = MixedPrecision("conf.yaml")
    converter.accuracy_criterion = AccuracyCriterion(0.5, relative=False)
    with pytest.raises(ConfigurationError, match="half the baseline"):
        converter()


def test_a_percentage_is_not_an_absolute_tolerance(here, run):
    _with_criterion(here, "{absolute: 2%}")
    code, _, err = run("tune", "conf.yaml")
    assert code == 2
    assert "tuning.accuracy_criterion.absolute" in err
    assert "'2%'; write relative: 2% for a fraction of the baseline" in err
    with pytest.raises(ConfigurationError, match="relative: 2%"):
        MixedPrecision().accuracy_criterion = {"absolute": "2%"}


def test_the_target_is_shown_in_the_unit_of_the_metric_before_the_first_trial(here, run, caplog):
    data = dict(np.load(here / "test.npz"))
    exact = dense_runs.scores(data["inputs"])
    noise = np.random.default_rng(2).normal(scale=2, size=exact.shape)
    np.savez(here / "test.npz", inputs=data["inputs"], labels=(exact + noise).astype("float32"))
    conf = (here / "conf.yaml").read_text().replace("metric: accuracy", "metric: rmse")
    (here / "conf.yaml").write_text(conf)
    code, _, err = run("tune", "conf.yaml")
    assert code == 0, err
    rmse = float(np.sqrt((noise**2).mean()))
    line = f"RMSE: FP32 {rmse:.4}"
    assert line in err
    assert f"target {rmse * 1.05:.3}" in err
    assert "(at most 5 % above FP32)" in err
    assert err.index(line) < err.index("trial 1")
    with caplog.at_level(logging.INFO, "neural_mp"):
        MixedPrecision("conf.yaml")()
    assert any(line in message for message in caplog.messages)


def test_labels_off_by_one_end_the_run_before_the_search(tmp_path, monkeypatch, run):
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path, shift=1))
    code, _, err = run("tune", "conf.yaml")
    assert code == 2
    assert "MetricError: the Accuracy of the FP32 model must be at least 0.01, got 0" in err
    assert "trial 1" not in err
    with pytest.raises(MetricError, match="labels match the data"):
        MixedPrecision("conf.yaml")()
    _with_criterion(tmp_path, "{absolute: 0.05, any_baseline: true}")
    code, _, err = run("tune", "conf.yaml")
    assert code == 0, err


@pytest.mark.parametrize(
    ("criterion", "words"),
    [
        (AccuracyCriterion(0.01), "at most 1 % below FP32"),
        (AccuracyCriterion(0.02, higher_is_better=False), "at most 2 % above FP32"),
        (AccuracyCriterion(0.5, relative=False), "at most 0.5 below FP32"),
        (AccuracyCriterion(-0.01, any_tolerance=True), "at least 1 % above FP32"),
    ],
)
def test_the_tolerance_as_text(criterion, words):
    assert criterion.words() == words
