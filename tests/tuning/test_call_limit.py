"""Calls that never return are ended after a time limit; others are not touched."""

from __future__ import annotations

import _thread
import contextvars
import sys
import threading
import time
from functools import partial

import numpy as np
import onnx_ir as ir
import pytest
from endless_nets import endless_onnx, run_in_thread
from still_clock import StillClock

from neural_mp.adaptors.onnxrt.graph.sessions import Runner
from neural_mp.core import criterion
from neural_mp.core.criterion import UnreturnedCallError
from neural_mp.errors import TuningError
from neural_mp.tuning import call_limit
from neural_mp.tuning.call_limit import CallLimit
from neural_mp.util.system.watched_thread import WatchedThread, count_lost_threads, watch_calls
from neural_mp.util.user_calls import UserCodeError, call_user

#: An end for what hangs, so that no failure keeps threads for ever.
HANGS_SECONDS = 300


@pytest.fixture
def limit(monkeypatch):
    """A limit of .2 s, and .2 s more."""
    monkeypatch.setattr(call_limit, "MIN_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(call_limit, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(call_limit, "_UNWIND_SECONDS", HANGS_SECONDS)
    calls = CallLimit()
    calls.timeout = 0.2
    return calls


def spin(seconds=HANGS_SECONDS):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def sleep():
    time.sleep(HANGS_SECONDS)


@pytest.fixture
def let_pass(limit, monkeypatch):
    """Function: let so many seconds pass on the clock of the limit, which stands still else."""
    clock = StillClock()
    clock.keep_time_of(monkeypatch, call_limit, criterion)

    def let_pass(seconds):
        clock.let_pass_in_view(seconds)
        return "done"

    return let_pass


def test_without_a_limit_everything_runs_in_the_callers_thread():
    assert CallLimit().run_part(threading.current_thread) is threading.current_thread()


@pytest.mark.parametrize("hang", [spin, sleep])
@pytest.mark.parametrize("by_main", [True, False])
def test_a_call_that_never_returns_is_ended_in_any_thread(limit, hang, by_main, monkeypatch):
    monkeypatch.setattr(call_limit, "_UNWIND_SECONDS", 0.2)
    caught = []

    def run():
        with pytest.raises(UnreturnedCallError) as error:
            limit.run_part(lambda: call_user(hang, form="eval_func(model)"))
        caught.append(error.value)

    run_in_thread(run, by_main)
    assert isinstance(caught[0], TuningError)
    message = str(caught[0])
    assert message.startswith("eval_func(model) (at test_call_limit.py, line ")
    assert "the time limit of 0.2 s (exit_policy.timeout) and 0.2 s more" in message
    assert limit.run_part(lambda: 3) == 3  # in another thread


def test_code_in_python_is_ended_itself(limit):
    before = count_lost_threads()
    with pytest.raises(UnreturnedCallError):
        limit.run_part(lambda: call_user(spin))
    assert count_lost_threads() == before


def test_short_calls_may_together_take_longer_than_the_limit(limit, let_pass):
    def call_many_times():
        return [call_user(lambda: let_pass(0.1)) for _ in range(10)]

    assert limit.run_part(call_many_times) == ["done"] * 10


def test_what_is_no_call_of_the_user_is_not_ended(limit, let_pass):
    assert limit.run_part(lambda: let_pass(0.7)) == "done"


def test_in_a_search_a_call_may_last_as_long_as_the_search_has_time(limit, let_pass):
    limit.deadline = criterion.Deadline(0.8)
    assert limit.run_part(lambda: call_user(lambda: let_pass(0.7))) == "done"
    with pytest.raises(UnreturnedCallError):
        limit.run_part(lambda: call_user(lambda: let_pass(HANGS_SECONDS)))


def test_a_call_may_take_twice_as_long_as_an_evaluation_in_fp32(limit, let_pass):
    limit.deadline, limit.evaluation_seconds = criterion.Deadline(0.1), 0.6
    assert limit.run_part(lambda: call_user(lambda: let_pass(0.9))) == "done"
    limit.evaluation_seconds = 0.0
    with pytest.raises(UnreturnedCallError):
        limit.run_part(lambda: call_user(lambda: let_pass(HANGS_SECONDS)))


def test_exceptions_and_context_pass_unchanged(limit):
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    assert limit.run_part(variable.get) == 5
    raised = ZeroDivisionError("theirs")

    def fail():
        raise raised

    with pytest.raises(UserCodeError) as error:
        limit.run_part(lambda: call_user(fail))
    assert error.value.error is raised
    with pytest.raises(StopIteration):
        limit.run_part(partial(next, iter(())))


def test_gradients_that_the_caller_switched_off_are_off(limit):
    torch = pytest.importorskip("torch")
    limit.run_part(lambda: 0)  # the thread exists
    with torch.no_grad():
        assert not limit.run_part(torch.is_grad_enabled)
    assert limit.run_part(torch.is_grad_enabled)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_a_part_at_once(limit):
    limit.timeout = 600.0
    begun, ended = threading.Event(), threading.Event()

    def work():
        try:
            begun.set()
            call_user(spin)
        finally:
            ended.set()

    def interrupt():
        begun.wait()
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        limit.run_part(work)
    assert ended.wait(HANGS_SECONDS / 2)


def test_nothing_of_a_part_is_kept():
    thread = WatchedThread()
    array = np.zeros(8)
    before = sys.getrefcount(array)
    future = thread.start_call(lambda: array)
    assert future.result() is array
    del future
    end = time.monotonic() + HANGS_SECONDS
    while sys.getrefcount(array) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert sys.getrefcount(array) == before


def test_an_endless_loop_of_onnx_runtime_is_ended_and_its_session_works_on(limit):
    runner = Runner(ir.from_proto(endless_onnx(above=0.0)), None)
    run = runner.make_fetcher(["y"])
    before = count_lost_threads()
    for endless in (run, partial(runner, fetches=["y"])):
        with pytest.raises(UnreturnedCallError, match="^the model did not return"):
            limit.run_part(partial(endless, {"x": np.ones((1, 8), np.float32)}))
        (ended,) = endless({"x": -np.ones((1, 8), np.float32)})
        assert ended.shape == (1, 4)
    assert count_lost_threads() == before


def test_a_call_is_named_by_its_function(limit):
    @watch_calls(lambda local: f"part {local['number']}")
    def hang(number):
        spin()

    with pytest.raises(UnreturnedCallError, match=r"^part 7 \(at test_call_limit.py, line"):
        limit.run_part(lambda: hang(7))
