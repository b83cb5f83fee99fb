"""Jobs on the nodes of a Ray cluster."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import psutil
import pytest
from ray_nodes_here import raylet_of
from tune_many_jobs import evaluations, write_jobs_into

import neural_mp
from neural_mp.errors import ConfigurationError
from neural_mp.reporting.jobs import JobsListener
from neural_mp.tuning.job_outcome import JobStatus

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path, digits, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return write_jobs_into(tmp_path, digits)


class Heard(JobsListener):
    def __init__(self):
        self.words = []

    def report(self, job, message):
        self.words.append((job.partition("-")[0], message))


def test_nodes_do_jobs_and_nothing_that_is_finished_is_done_again(folder, cluster):
    for name in ("first", "second"):
        folder(name)
    folder("third", "Raises")
    heard = Heard()
    workers = f"ray:{cluster.address}"
    done = neural_mp.tune_many("jobs", workers=workers, output="out", listener=heard)
    status = {Path(job.file).stem: job.status for job in done.outcomes}
    assert status == {
        "first": JobStatus.MET,
        "second": JobStatus.MET,
        "third": JobStatus.FAILED,
    }
    (failed,) = done.failed
    assert failed.reason == "ZeroDivisionError: nothing to divide by"
    assert ("first", "starts") in heard.words
    assert any(message.startswith("trial 1: met") for _, message in heard.words)
    assert done.page.is_file()
    assert neural_mp.load(Path("out", done.outcomes[0].name, "result")).met

    evaluated = evaluations("end")
    again = neural_mp.tune_many("jobs", output="out")  # by processes of this machine
    assert evaluations("end") == evaluated
    assert len([job for job in again.outcomes if job.known]) == 2


def test_a_job_whose_node_is_killed_goes_on_at_another(folder, cluster, tmp_path):
    names = ("first", "second")  # one for every node
    for name in names:
        folder(name, "Pausing")
    (node,) = cluster.worker_nodes  # besides the head
    raylet = raylet_of(node)

    def kill():
        until = time.monotonic() + 300
        # The file that a job leaves is named for the parent of the process that started it.
        while not (tmp_path / f"at-{raylet}").exists() and time.monotonic() < until:
            time.sleep(0.05)
        machine = psutil.Process(raylet)
        for process in (*machine.children(recursive=True), machine):
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    heard = Heard()
    workers = {"engine": "ray", "address": cluster.address}
    done = neural_mp.tune_many("jobs", workers=workers, output="out", listener=heard)
    killer.join()
    assert [job.status for job in done.outcomes] == [JobStatus.MET] * len(names)
    (lost,) = {job for job, message in heard.words if message.endswith("was lost")}
    assert (lost, "resumes") in heard.words


def test_an_engine_that_does_no_jobs_is_told(folder, monkeypatch):
    folder("first")
    with pytest.raises(ConfigurationError, match="there is no engine 'rey' for workers"):
        neural_mp.tune_many("jobs", workers="rey", output="out")
