"""Signals of `tune` to a script: exit codes, no result where none is wanted, paths, numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import dense_runs
import pytest

pytestmark = pytest.mark.usefixtures("quick_runs")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A workplace as the working directory."""
    monkeypatch.chdir(dense_runs.write_workplace(tmp_path))
    return tmp_path


def _edit(folder, old: str, new: str) -> None:
    conf = (folder / "conf.yaml").read_text()
    assert old in conf
    (folder / "conf.yaml").write_text(conf.replace(old, new))


def _never_faster(folder) -> None:
    _edit(folder, "objective: modelsize", "objective: latency\n  min_speedup: 999")


@pytest.mark.slow
def test_an_accuracy_met_without_a_gain_is_code_5(here, run):
    _never_faster(here)
    code, out, err = run("tune", "conf.yaml", "-o", "tuned")
    assert code == 5, err
    assert "No plan that meets the target is faster" in out
    assert (here / "tuned" / "neural_mp.json").is_file()


def test_a_missed_target_is_code_1(here, run, monkeypatch):
    from neural_mp.core.criterion import AccuracyCriterion

    monkeypatch.setattr(AccuracyCriterion, "met", lambda *arguments: False)
    code, out, _ = run("tune", "conf.yaml", "-o", "tuned")
    assert code == 1
    assert "NOT met" in out


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True])
def test_fail_if_missed_writes_no_result(here, run, kept):
    _never_faster(here)
    code, out, err = run(
        "tune", "conf.yaml", "-o", "tuned", *(() if kept else ["--fail-if-missed"])
    )
    assert code == 5
    assert (here / "tuned").exists() is kept
    assert ("nothing is saved to tuned" in err) is not kept
    assert ("saved to tuned" in out) is kept


def test_fail_if_missed_saves_what_met_the_target(here, run):
    code, out, err = run("tune", "conf.yaml", "-o", "tuned", "--fail-if-missed", "--json")
    assert code == 0, err
    assert json.loads(out)["saved_to"] == "tuned"
    assert (here / "tuned").is_dir()


@pytest.mark.parametrize("place", ["/proc/tuned", "file/tuned", "file"])
def test_an_output_that_cannot_be_written_is_refused_before_the_search(here, run, place):
    (here / "file").write_text("")
    if place.startswith("/proc") and not Path("/proc").is_dir():
        pytest.skip("no /proc")
    code, _, err = run("tune", "conf.yaml", "-o", place)
    assert code == 2
    assert repr(place) in err
    assert "FP32" not in err
    assert not (here / "neural_mp_workspace").exists()


@pytest.mark.slow
def test_trials_count_on_after_resume(here, run, monkeypatch):
    _edit(here, "tuning:", "tuning:\n  strategy: random\n  exit_policy: {max_trials: 1}")
    _never_faster(here)
    _, _, err = run("tune", "conf.yaml")
    assert re.findall(r"trial (\d+):", err) == ["1"]
    _edit(here, "max_trials: 1", "max_trials: 3")
    _, _, err = run("tune", "conf.yaml", "--resume")
    assert re.findall(r"trial (\d+):", err) == ["2", "3"]


def test_tune_and_report_have_the_same_trials(here, run):
    _, out, _ = run("tune", "conf.yaml", "--json")
    tuned = json.loads(out)
    code, out, err = run("report", "--json")
    assert code == 0, err
    reported = json.loads(out)
    assert tuned["schema"] == reported["schema"] == 1
    assert tuned["trials"]
    assert [trial.keys() for trial in tuned["trials"]] == [t.keys() for t in reported["trials"]]
    for ours, theirs in zip(tuned["trials"], reported["trials"], strict=True):
        for key in ("number", "plan", "counts", "accuracy", "loss", "outcome"):
            assert ours[key] == theirs[key]
    assert tuned["plan"] == reported["plan"]


def test_a_missing_model_is_said_to_be_missing(here, run):
    code, _, err = run("inspect", "missing_folder")
    assert code == 2
    assert "the model 'missing_folder' does not exist" in err
