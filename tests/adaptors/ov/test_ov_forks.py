"""Forked children of a process that is running a model of OpenVINO in another thread."""

import os
import signal
from collections.abc import Callable

import numpy as np
import openvino as ov
import pytest

from neural_mp.adaptors.openvino.runtime import Runner, ShapedRunner
from neural_mp.errors import ForkError

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks exist on POSIX only")
#: Seconds after which a child counts as blocked.
LIMIT_SECONDS = 300
FEEDS = [np.ones((2, 4), np.float32)]


def build_model() -> ov.Model:
    """Return the sum of an input with itself."""
    value = ov.opset13.parameter([-1, 4], np.float32, "x")
    return ov.Model([ov.opset13.add(value, value)], [value])


def fork_and_run(call: Callable[[], object]) -> str:
    """Return `done`, the name of the error, or an empty text for a child that is blocked."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_SECONDS)
        try:
            call()
            outcome = "done"
        except BaseException as error:  # noqa: BLE001 - nobody sees an error of a child
            outcome = type(error).__name__
        os.write(writer, outcome.encode())
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as pipe:
        return pipe.read()


@pytest.mark.parametrize(("streams", "outcome"), [(1, ForkError.__name__), (2, "done")])
def test_a_request_that_the_parent_was_running_is_not_waited_for(streams, outcome):
    """A lock held at the fork stands for another thread of the parent within a run."""
    runner = Runner(build_model(), streams=streams)
    runner(FEEDS)
    busy, *_ = runner._requests
    with busy.lock:
        assert fork_and_run(lambda: runner(FEEDS)) == outcome
    assert fork_and_run(lambda: runner(FEEDS)) == "done"
    np.testing.assert_array_equal(runner(FEEDS)[0], 2 * FEEDS[0])


def test_a_form_that_the_parent_was_selecting_is_selected_again():
    runner = ShapedRunner(build_model(), ((2, 4),))
    runner(FEEDS)
    with runner.lock:
        assert fork_and_run(lambda: runner(FEEDS)) == "done"
