"""Jobs go to the first place that is free, and to another one where a place was lost."""

from dataclasses import replace

import pytest

from neural_mp.errors import TuningError
from neural_mp.jobs import worker_pool
from neural_mp.jobs.worker_pool import WorkerLostError, WorkerPool
from neural_mp.reporting.jobs import JobsListener
from neural_mp.tuning.executors.contract import RUNS_AGAIN
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus, read_outcome


class Heard(JobsListener):
    def __init__(self):
        self.told_of, self.over = [], []

    def report(self, job, message):
        self.told_of.append((job, message))

    def ended(self, outcome):
        self.over.append(outcome.name)


class Scripted:
    """A place that does with a job what a function says."""

    def __init__(self, act):
        self._act, self.stopped = act, False

    def run_job(self, job, folder, prior, tell):
        tell("starts")
        outcome = self._act(job.name)
        return None if outcome is None else replace(job, status=JobStatus.MET, reason="")

    def stop_job(self):
        self.stopped = True


@pytest.fixture
def work(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_pool, "_LOOK", 0.01)

    def worked(names, *acts):
        heard, workers = Heard(), [Scripted(act) for act in acts]
        jobs = [JobOutcome(name, f"{name}.yaml", "0", JobStatus.BEGUN, "") for name in names]
        for name in names:
            (tmp_path / name).mkdir(exist_ok=True)
        try:
            WorkerPool(jobs, tmp_path, heard, workers).run_jobs()
        finally:
            assert all(worker.stopped for worker in workers)
        return heard

    return worked


def lost(_):
    raise WorkerLostError("node n was lost")


def test_what_a_job_tells_comes_before_its_end(work):
    heard = work("abc", lambda name: name, lambda name: name)
    assert sorted(heard.over) == ["a", "b", "c"]
    assert sorted(heard.told_of) == [("a", "starts"), ("b", "starts"), ("c", "starts")]


def test_a_job_that_somebody_else_does_lets_others_go_first(work):
    remaining = {"a": 3}

    def act(name):
        remaining[name] = remaining.get(name, 1) - 1
        return name if not remaining[name] else None

    assert work("abc", act).over == ["b", "c", "a"]


def test_a_job_whose_place_is_lost_goes_on_at_another(work):
    heard = work("ab", lost, lambda name: name)
    assert sorted(heard.over) == ["a", "b"]
    assert ("a", "node n was lost") in heard.told_of


def test_without_places_what_is_left_is_counted(work):
    with pytest.raises(
        TuningError, match="all workers were lost before 3 jobs ended; finished jobs are kept"
    ):
        work("abc", lost, lost)


def test_a_job_that_loses_one_place_after_another_has_failed(work, tmp_path):
    def act(name):
        return lost(name) if name == "a" else name

    names = ("a", *map(str, range(RUNS_AGAIN + 1)))
    assert "a" in work(names, *[act] * len(names)).over
    outcome = read_outcome(tmp_path / "a")
    assert (outcome.status, outcome.reason) == (JobStatus.FAILED, "node n was lost")


def test_an_error_of_a_place_ends_the_others(work):
    def act(name):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        work("abc", act, lambda name: name)
