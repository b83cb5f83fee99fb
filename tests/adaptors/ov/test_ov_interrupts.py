"""Calls of OpenVINO that signals interrupt, and first calls in several threads."""

import random
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from neural_mp.adaptors.openvino.runtime import Runner, ops, ov

WEIGHT = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
TIMEOUT_SECONDS = 120


class AlarmError(Exception):
    """Raised by the handler of the timer."""


def dense():
    parameter = ops.parameter([-1, 64], np.float32, name="x")
    product = ops.matmul(parameter, ops.constant(WEIGHT), False, False)
    return ov.Model([product], [parameter], "dense")


@pytest.fixture
def alarm():
    """Return a function that starts a timer, whose handler raises `AlarmError`."""

    def ring(*_):
        raise AlarmError

    previous = signal.signal(signal.SIGALRM, ring)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers with signals")
@pytest.mark.parametrize("streams", [None, 2])
def test_an_interrupted_call_raises_the_handlers_exception_and_blocks_no_later_call(alarm, streams):
    run = Runner(dense(), streams=streams)
    draw, interrupts = random.Random(0), 0
    for attempt in range(300):
        # Some shapes are new, and run asynchronously.
        x = np.full((1 + attempt % 40, 64), attempt, np.float32)
        try:
            alarm(draw.uniform(5e-5, 1.5e-3))
            for _ in range(10_000):  # more than any timer allows
                run([x])
        except AlarmError:
            interrupts += 1
    assert interrupts == 300
    x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
    with ThreadPoolExecutor(4) as pool:
        results = [pool.submit(run, [x]) for _ in range(8)]
        for result in results:
            (output,) = result.result(TIMEOUT_SECONDS)
            np.testing.assert_allclose(output, x @ WEIGHT, rtol=1e-4, atol=1e-4)


def test_threads_may_use_a_type_for_the_first_time_at_once():
    code = """
        import sys, threading
        import numpy as np
        from neural_mp.adaptors.openvino.runtime import core, dtype_of, ops, ov

        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(4)

        def use_types():
            barrier.wait()
            assert dtype_of(ov.Type.i64) == np.int64
            parameter = ops.parameter([2, 4], np.float32)
            weight = ops.constant(np.ones((4, 4), np.float32))
            product = ops.matmul(parameter, weight, False, False)
            request = core().compile_model(ov.Model([product], [parameter]), "CPU")
            request([np.ones((2, 4), np.float32)])

        threads = [threading.Thread(target=use_types) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert finished.stdout == "done\n", finished.stderr
