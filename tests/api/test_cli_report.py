"""The page of a run, from a workspace alone."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from quick_runs import make_quick
from rich.console import Console

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision, common
from neural_mp.reporting import LiveListener
from neural_mp.tuning.listener import Listener


class _Dies(Listener):
    """A user's listener that ends the process's run in its middle."""

    def trial(self, *_, **__):
        raise SystemError("the machine went down")


class Right:
    """A metric."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.right = self.all = 0

    def update(self, preds, labels) -> None:
        self.right += int((preds.argmax(1) == labels).sum())
        self.all += len(labels)

    def result(self) -> float:
        return self.right / self.all


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("workspace")


@pytest.fixture(scope="module")
def tuned(kept, net, digits):
    """The result of a run, and a second run in the same workspace that did not end."""
    train, test = digits
    options = {
        "model": net,
        "precisions": "int8",
        "metric": Right(),
        "eval_dataloader": common.DataLoader(test, batch_size=100),
        "calib_dataloader": common.DataLoader(train, batch_size=50),
        "workspace": kept,
    }
    with pytest.MonkeyPatch.context() as quick:
        make_quick(quick)
        result = MixedPrecision(**options)()
        with pytest.raises(SystemError):
            MixedPrecision(**options, listener=_Dies())()
    return result


@pytest.mark.slow
def test_a_finished_run_and_one_that_did_not_end_have_pages(
    run, tmp_path, kept, tuned, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("report", str(kept), "--run", "1", "--output", "pages/first.html")
    assert code == 0
    assert "tuning-0001 met its target; page saved to pages/first.html" in out
    first = Path("pages/first.html").read_text(encoding="utf-8")
    assert "Target met" in first
    assert all(op in first for op in tuned.plan)
    code, out, _ = run("report", str(kept))
    assert code == 0
    assert "tuning-0002 has no end" in out
    assert "Unfinished" in Path("report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_document_has_what_the_page_is_of(run, tmp_path, kept, tuned):
    page = tmp_path / "page.html"
    code, out, _ = run("report", str(kept), "--run", "1", "-o", str(page), "--json")
    assert code == 0
    document = json.loads(out)
    assert document["run"] == tuned.record.name
    assert document["met"] is True
    assert document["saved_to"] == str(page)
    assert document["report"]["accuracy"] == tuned.report.accuracy
    assert len(document["trials"]) == len(tuned.trials)
    assert set(document["plan"]) == set(tuned.plan)
    code, out, _ = run("report", str(kept), "-o", str(page), "--json")
    assert json.loads(out)["ended"] is None


@pytest.mark.slow
def test_a_saved_result_has_the_page_of_its_run(run, tmp_path, tuned):
    tuned.save(tmp_path / "saved")
    page = tmp_path / "page.html"
    assert run("report", str(tmp_path / "saved"), "--output", str(page))[0] == 0
    assert "Target met" in page.read_text(encoding="utf-8")
    code, _, err = run("report", str(tmp_path / "saved"), "--run", "2")
    assert code == 2
    assert "require a workspace" in err


@pytest.mark.slow
def test_two_runs_are_compared_on_one_page(run, tmp_path, kept, tuned):
    tuned.save(tmp_path / "saved")
    page = tmp_path / "page.html"
    for against in ("1", str(tmp_path / "saved")):
        assert run("report", str(kept), "--against", against, "--output", str(page))[0] == 0
        text = page.read_text(encoding="utf-8")
        assert "common ops in another precision" in text
        assert "<script" not in text
    code, _, err = run("report", str(kept), "--against", "9")
    assert code == 2
    assert "there is no run 9 in" in err


def test_what_has_no_run_is_said_in_one_line(run, tmp_path, kept, tuned):
    digest = tuned.record.name.partition("/")[0]
    cases = {
        ("missing",): "'missing' is not a folder; give the workspace of a run",
        (str(tmp_path),): "contains no runs",
        (str(kept), "--run", "9"): "there is no run 9 in",
        (str(kept), "--model", "x"): f"models, latest first: {digest}",
        ("x", "--storage", "nonsense://"): "cannot be opened",
        (str(kept), "-o", str(kept / "history.db" / "x.html")): ("cannot be written"),
    }
    for arguments, message in cases.items():
        code, out, err = run("report", *arguments)
        assert code == 2, arguments
        assert message in err
        assert len(err.splitlines()) == 1
        assert not out
    assert not Path("missing").exists()


def test_a_storage_that_does_not_exist_is_not_created(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = run("report", "--storage", "sqlite:///team.db")
    assert code == 2
    assert "there is no run in 'sqlite:///team.db': the file does not exist" in err
    assert not Path("team.db").exists()
    code, _, err = run("report", "--storage", "team.db")
    assert code == 2
    assert "got 'team.db'; for a SQLite file, write 'sqlite:///team.db'" in err


def test_an_audit_and_sensitivities_are_printed_as_tables(tuned):
    printed = str(tuned.audit())
    assert printed.endswith("the plan holds")
    assert len(printed.splitlines()) < 10
    decisions = str(tuned.sensitivity())
    assert "quantization noise" in decisions
    assert all(row.name in decisions for row in tuned.sensitivity())


def test_lines_of_trials_name_the_metric(tuned):
    console = Console(file=io.StringIO(), width=200)
    listener = LiveListener(console)
    for name in ("RMSE", ""):
        listener.metric(name, AccuracyCriterion())
        listener.trial(tuned.trials[0], None)
    first, second = console.file.getvalue().splitlines()
    assert f"RMSE {tuned.trials[0].accuracy:.5g}, Prec" in first
    assert f"accuracy {tuned.trials[0].accuracy:.5g}, Prec" in second


@pytest.mark.slow
def test_a_notebook_shows_a_result_and_its_parts(tmp_path, tuned):
    cell = tuned._repr_html_()
    assert "Target met" in cell
    assert "<script" not in cell
    tuned.save(tmp_path / "saved")
    assert "Target met" in neural_mp.load(tmp_path / "saved")._repr_html_()
    assert "latency, batch of" in tuned.report._repr_html_()
    assert all(op in tuned.plan._repr_html_() for op in tuned.plan)
