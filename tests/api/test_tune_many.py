"""Many tuning files are many jobs: none stops another, and none is done twice."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from tune_many_jobs import METRICS, evaluations, write_jobs_into

import neural_mp
from neural_mp.errors import ConfigurationError, TuningError
from neural_mp.jobs.driver import compute_job_digest
from neural_mp.reporting.jobs import JobsListener, LiveJobs, build_jobs_table
from neural_mp.reporting.page.document import build_jobs_page
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus, read_outcome

#: Evaluations of a job that has one trial: that of FP32 and that of the trial.
EVALUATIONS = 2


@pytest.fixture
def folder(tmp_path, digits, monkeypatch):
    """A folder with data, metrics, and a maker of jobs, which is the current one."""
    monkeypatch.chdir(tmp_path)
    return write_jobs_into(tmp_path, digits)


def command(*arguments, **options):
    argv = [sys.executable, "-m", "neural_mp.cli.app", "tune-many", "jobs", "-o", "out"]
    return subprocess.Popen(
        [*argv, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        **options,
    )


@pytest.mark.slow
def test_a_crash_stops_nothing_and_what_is_finished_is_not_done_again(folder, run):
    folder("first")
    folder("second", "Raises")
    broken = folder("third", "Crashes")
    code, out, err = run("tune-many", "jobs/*.yaml", "--workers", str(10**9), "-o", "out", "--json")
    assert code == 1
    document = json.loads(out)
    jobs = {Path(job["file"]).stem: job for job in document["jobs"]}
    assert [job["status"] for job in document["jobs"]] == ["met", "failed", "failed"]
    assert jobs["second"]["reason"] == "ZeroDivisionError: nothing to divide by"
    assert "SIGSEGV" in jobs["third"]["reason"]
    assert evaluations("end") == EVALUATIONS
    assert re.search(r"^first-\w+: met its target", err, re.MULTILINE)
    assert re.search(r"^third-\w+: failed: the process was ended by signal", err, re.MULTILINE)

    page = Path(document["page"]).read_text("utf-8")
    links = re.findall(r'href="([^"]+)"', page)
    assert all((Path("out") / link).is_file() for link in links)
    assert sum(link.endswith("result/report.html") for link in links) == 1
    assert "2 without a result" in page
    assert neural_mp.load(Path("out", jobs["first"]["name"], "result")).met

    # Another name, other words for the same, another place for the runs: the same job.
    Path("jobs/first.yaml").rename("jobs/renamed.yaml")
    with Path("jobs/renamed.yaml").open("a") as file:
        file.write("# a comment\n")
    folder("third")  # mended
    assert broken.is_file()
    code, out, err = run("tune-many", "jobs", "-o", "out")
    assert code == 1
    assert evaluations("end") == 2 * EVALUATIONS
    assert err.count("finished before") == 1
    assert "3 jobs: 2 met, 1 failed, 1 of them finished before" in out


@pytest.mark.slow
def test_after_kill_9_two_commands_go_on_and_nothing_is_repeated(folder):
    for name in ("first", "second"):
        folder(name)
    folder("zeroth", "Raises")
    process = command(env={**os.environ, "PAUSE": "0.5"})
    deadline = time.monotonic() + 600
    # The first job has ended, and the only trial of the second is half done.
    while (evaluations("begin"), evaluations("end")) != (4, 3):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    processes = [command("--json"), command("--json")]
    for again in processes:
        document = json.loads(again.communicate(timeout=600)[0])
        assert [job["status"] for job in document["jobs"]] == ["met", "met", "failed"]
    # One of the two took over from the other that it fails.
    (log,) = Path("out").glob("zeroth-*/log.txt")
    assert log.read_text().count("Traceback") == 1
    assert evaluations("end") == 2 * EVALUATIONS
    # Only what the kill cut off was begun twice.
    assert evaluations("begin") == 2 * EVALUATIONS + 1


@pytest.mark.slow
@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_processes_and_leaves_a_page(folder, number):
    folder("first")
    process = command(env={**os.environ, "PAUSE": "3600"}, start_new_session=True)
    deadline = time.monotonic() + 600
    while not evaluations("begin"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    assert process.wait(timeout=600) == 128 + number
    assert "interrupted" in Path("out/index.html").read_text("utf-8")


@pytest.mark.parametrize("changed", ["model", "data", "metric", "setting", "file that is no YAML"])
def test_a_job_is_another_one_if_what_it_is_about_changed(folder, changed):
    file = folder("first")
    text = file.read_text()
    if changed == "file that is no YAML":
        text = "model: ["
        file.write_text(text)
    previous = compute_job_digest(file)
    if changed == "model":
        folder("other")
        shutil.copy("other.onnx", "first.onnx")
    elif changed == "data":
        np.savez("test.npz", inputs=np.zeros((4, 64), np.float32), labels=np.zeros(4))
    elif changed == "metric":
        Path("metrics_of_mine.py").write_text(METRICS + "# better\n")
    elif changed == "setting":
        file.write_text(text.replace("0.05", "0.04"))
    else:
        file.write_text(text + "[")
    assert compute_job_digest(file) != previous


def test_a_job_is_the_same_wherever_its_runs_are_kept(folder):
    file = folder("first")
    previous = compute_job_digest(file)
    file.write_text(file.read_text().replace("objective", "workers: 2, workspace: w, objective"))
    assert compute_job_digest(file) == previous


def test_what_is_wrong_is_said_in_one_line(folder, run):
    file = folder("first")
    for arguments, message in {
        ("jobs/second.yaml",): "there is no 'jobs/second.yaml'",
        ("nowhere/*.yaml",): "there is no 'nowhere/*.yaml'",
        ("jobs", "-o", "test.npz"): "cannot be written",
    }.items():
        code, _, err = run("tune-many", *arguments)
        assert code == 2
        assert message in err
        assert len(err.splitlines()) == 1
    with pytest.raises(ConfigurationError, match="workers must be a whole number from 1"):
        neural_mp.tune_many(file, workers=0)
    Path("jobs/empty").mkdir()
    with pytest.raises(ConfigurationError, match="no tuning file was found"):
        neural_mp.tune_many("jobs/empty")
    Path("job.json").write_text("{")
    with pytest.raises(TuningError, match="delete the file to repeat the job"):
        read_outcome(Path())


def test_a_terminal_shows_a_line_for_every_job_that_runs():
    screen = io.StringIO()
    live = LiveJobs(Console(file=screen, force_terminal=True, width=100))
    live.began(2)
    live.report("first", "Calibrating")
    live.report("second", "Evaluating FP32")
    live._live.refresh()
    assert re.search(r"first .*0 s.*Calibrating", screen.getvalue())
    assert "0 of 2 jobs ended" in screen.getvalue()
    live.ended(JobOutcome("first", "first.yaml", "0", JobStatus.FAILED, "no luck"))
    live.close()
    assert "first: failed: no luck" in screen.getvalue()
    JobsListener().report("nobody", "listens")


def test_names_cannot_break_out_of_the_page():
    bad = JobOutcome("<b>", '"><script>', "0", JobStatus.FAILED, "<script>alert(1)</script>")
    page = build_jobs_page([bad], {"<b>": 'javascript"<'})
    assert "<script" not in page
    assert "script-src 'none'" in page
    assert build_jobs_table([bad]).row_count == 1
