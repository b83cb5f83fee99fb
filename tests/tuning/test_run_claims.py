"""Of two processes at once, one writes into a run; what a killed one had is free at once."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import optuna
import psutil
import pytest

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError, RunInUseError
from neural_mp.runs import lease
from neural_mp.runs.history import History, get_storage_url, read_record
from neural_mp.runs.lease import RunRow
from neural_mp.runs.registry import run_names
from neural_mp.util.optional_packages import silence_optuna_log
from neural_mp.util.system.processes import ProcessIdentity

ABOUT = {"model": "1" * 16, "criterion": "1 %"}
#: Opens a run, says so, and waits for its end.
PROCESS = """
import sys
from neural_mp.runs.history import History
ABOUT = {"model": "1" * 16, "criterion": "1 %"}
history = History(sys.argv[1], ABOUT, True, sys.argv[2] == "resume")
print(history.name, flush=True)
sys.stdin.read()
"""


#: Seconds in which the busiest machine comes to what a test waits for.
PATIENCE_SECONDS = 600


def wait_until(is_so):
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def url(tmp_path):
    return get_storage_url(tmp_path / "shared")


@pytest.fixture
def elsewhere(url):
    """Opens a run in another process, which is handed over."""
    started = []

    def opened(mode="new"):
        process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, url, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        process.name = process.stdout.readline().strip()
        assert process.name
        return process

    yield opened
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def begin(url):
    return lambda resume=False: History(url, ABOUT, True, resume)


def executed(url, statement, *values):
    """What a statement gives on the database of a storage."""
    with sqlite3.connect(url.removeprefix("sqlite:///"), timeout=30) as connection:
        rows = connection.execute(statement, values).fetchall()
    connection.close()
    return rows


def read_row(url, name):
    """Return the lease of a run."""
    ((stored,),) = executed(url, "SELECT lease FROM neural_mp_runs WHERE name = ?", name)
    return json.loads(stored)


def row(url, name, change):
    """Change the lease of a run, and return the new one."""
    values = read_row(url, name)
    change(values)
    executed(url, "UPDATE neural_mp_runs SET lease = ? WHERE name = ?", json.dumps(values), name)
    return values


@pytest.mark.slow
def test_who_resumes_a_run_that_goes_on_is_told_where(begin, elsewhere):
    process = elsewhere()
    with pytest.raises(
        RunInUseError, match=rf"'{process.name}' is in use by process {process.pid} on"
    ):
        begin(resume=True)
    # A run of one's own is no trouble to anybody.
    with begin() as own:
        assert own.name != process.name
    assert begin(resume=True).name == own.name
    process.communicate()


@pytest.mark.slow
def test_what_a_killed_process_had_is_free_at_once(begin, elsewhere):
    process = elsewhere()
    process.send_signal(signal.SIGKILL)
    # Nobody waited for it yet.
    wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert begin(resume=True).name == process.name
    process.wait()
    assert begin(resume=True).name == process.name


@pytest.mark.slow
def test_a_run_is_free_after_its_end(begin, elsewhere):
    process = elsewhere()
    process.communicate()
    with begin(resume=True) as ours:
        assert ours.name == process.name
    assert begin(resume=True).name == process.name


def test_two_threads_of_a_process_do_not_share_a_run(begin):
    history, errors = begin(), []

    def resume():
        try:
            begin(resume=True)
        except HistoryError as error:
            errors.append(error)

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join()
    assert isinstance(errors[0], RunInUseError)
    history.close()
    assert begin(resume=True).name == history.name


@pytest.mark.slow
def test_another_process_of_the_same_number_is_not_the_one_that_had_it(begin, elsewhere, url):
    process = elsewhere()
    row(url, process.name, lambda values: values["process"].update(started=1e9))
    assert begin(resume=True).name == process.name


def _away(values):
    values["process"].update(namespace="another machine")


def test_who_cannot_be_seen_is_dead_once_he_gives_no_sign_of_life(begin, url, monkeypatch):
    monkeypatch.setattr(lease, "_LEASE_TIMEOUT_SECONDS", 1.0)
    history = begin()
    history._lease._heartbeat._ended.set()
    row(url, history.name, _away)
    started = time.monotonic()
    with begin(resume=True) as ours:
        assert ours.name == history.name
    assert time.monotonic() - started >= 1


def test_who_gives_signs_of_life_cannot_be_taken_for_dead(begin, url):
    history = begin()
    history._lease._heartbeat._ended.set()
    values = row(url, history.name, _away)
    timer = threading.Timer(1.0, row, (url, history.name, lambda v: v.update(beats=7)))
    timer.start()
    with pytest.raises(RunInUseError, match="is in use by process .* elsewhere since"):
        begin(resume=True)
    timer.join()
    assert values["beats"] == 0


def test_signs_of_life_are_given(begin, url, monkeypatch):
    monkeypatch.setattr(lease, "_HEARTBEAT_SECONDS", 0.05)
    with begin() as history:
        wait_until(lambda: read_row(url, history.name)["beats"] > 1)


def test_who_was_taken_for_dead_writes_no_more(begin, url, monkeypatch):
    monkeypatch.setattr(lease, "_HEARTBEAT_SECONDS", 0.05)
    history = begin()
    number = history.begin_trial()
    row(url, history.name, _away)
    assert history._lease._heartbeat._ended.wait(PATIENCE_SECONDS)
    with pytest.raises(RunInUseError, match="elsewhere since"):
        history.begin_trial()
    history.finish_trial(Trial(PrecisionPlan(), Outcome.MET, 0.9, number=number))  # it is not lost


def damaged(pid):
    process = {**ProcessIdentity.of_this_process().to_dict(), "pid": pid}
    return json.dumps({"process": process, "since": "", "token": "a", "beats": 0})


@pytest.mark.parametrize(
    "words",
    [
        "",
        "[]",
        "{}",
        '{"process": {"pid": 1}}',
        "no JSON",
        "[" * 100_000,
        *(damaged(pid) for pid in (-5, 10**30, float("inf"))),
    ],
)
def test_a_damaged_row_keeps_nobody_out(words):
    assert lease._LeaseOwner.from_text(words).is_alive is False


def test_a_run_of_which_it_is_not_known_what_it_was_about_is_not_seen(begin, url):
    with silence_optuna_log():
        # As a process left it that was killed before it had written more.
        optuna.create_study(storage=url, study_name=f"{'1' * 12}/tuning-0001")
    with pytest.raises(HistoryError, match="there is no run to resume in"):
        begin(resume=True)
    with begin() as history:
        assert history.name.endswith("tuning-0002")
    assert begin(resume=True).name == history.name


def test_a_run_is_not_seen_before_it_says_what_it_is_about(begin, url, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(RunRow, "insert_row", killed)
    with pytest.raises(KeyboardInterrupt):
        begin()
    monkeypatch.undo()
    assert run_names(url) == []
    with pytest.raises(HistoryError, match="there is no run to resume in"):
        begin(resume=True)
    assert begin().name.endswith("tuning-0002")


def test_a_run_whose_study_was_deleted_is_passed_over(begin, url):
    for _ in range(2):
        begin().close()
    first, last = map(str, run_names(url))
    with silence_optuna_log():
        optuna.delete_study(study_name=last, storage=url)
    with begin(resume=True) as resumed:
        assert resumed.name == first
    with pytest.raises(HistoryError, match=f"run '{first}' must have a description"):
        read_record(url)
    with pytest.raises(HistoryError, match="there is no run 2"):
        read_record(url, 2)


def test_this_process_knows_itself():
    identity = ProcessIdentity.of_this_process()
    assert identity.is_this_one
    assert ProcessIdentity.from_dict(json.loads(json.dumps(identity.to_dict()))) == identity
    assert str(identity) == f"process {os.getpid()} on this machine"


def test_an_identity_with_the_name_of_the_host_is_read():
    """Earlier versions wrote the name into leases of runs that may still be alive."""
    stored = {"host": "vm", **ProcessIdentity.of_this_process().to_dict()}
    assert ProcessIdentity.from_dict(stored).is_this_one


def _leased_by(url, lease):
    """A run whose row holds such a lease."""
    with History(url, ABOUT, True) as history:
        history.cache.put_entry("something", 1)
    executed(url, "UPDATE neural_mp_runs SET lease = ?", lease)


@pytest.mark.parametrize("lease", [None, 7, "[1]", "{", b"\xff", b"{}"])
def test_a_lease_of_another_kind_keeps_nobody_out(url, lease):
    _leased_by(url, lease)
    History(url, ABOUT, True, resume=True).close()


def test_a_lease_that_cannot_be_replaced_is_one_error(url, monkeypatch):
    _leased_by(url, "{}")
    monkeypatch.setattr(RunRow, "replace_lease", lambda *_: False)
    with pytest.raises(HistoryError, match="cannot be acquired: its row .* is damaged or missing"):
        History(url, ABOUT, True, resume=True)


@pytest.mark.parametrize(
    ("accident", "words"),
    [("DELETE FROM", "was deleted from"), ("DROP TABLE", "cannot be read from")],
)
def test_a_storage_that_breaks_while_a_run_goes_on_is_one_error(url, accident, words, monkeypatch):
    monkeypatch.setattr(lease, "_HEARTBEAT_SECONDS", 0.05)
    with History(url, ABOUT, True) as history:
        executed(url, f"{accident} neural_mp_runs")
        history._lease._heartbeat._lost = True
        with pytest.raises(HistoryError, match=f"{words} its storage"):
            history.begin_trial()


def test_a_run_leaves_the_tables_of_optuna_to_optuna(begin, url):
    query = "SELECT name, sql FROM sqlite_master WHERE tbl_name <> 'neural_mp_runs' ORDER BY name"
    with silence_optuna_log():
        optuna.create_study(storage=f"{url}.plain")
    with begin() as history:
        history.finish_trial(Trial(PrecisionPlan(), Outcome.MET, 0.9, number=history.begin_trial()))
    assert executed(url, query) == executed(f"{url}.plain", query)
    assert executed(url, "SELECT key FROM study_user_attributes") == []
