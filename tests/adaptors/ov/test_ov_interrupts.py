"""Signals in processes that use OpenVINO, and first calls in several threads.

Each runs in a process of its own: a call that blocks for ever must not block other tests.
"""

import signal
import subprocess
import sys
import textwrap

import pytest

TIMEOUT_SECONDS = 600


def run_alone(code):
    """Return the output of code that runs in another process."""
    command = [sys.executable, "-W", "ignore", "-X", "faulthandler", "-c", textwrap.dedent(code)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs timers with signals")
@pytest.mark.parametrize("streams", [None, 2])
def test_an_interrupted_call_raises_the_handlers_exception_and_blocks_no_later_call(streams):
    code = f"""
        import random, signal
        from concurrent.futures import ThreadPoolExecutor
        import numpy as np
        from neural_mp.adaptors.openvino.runtime import Runner, ops, ov

        class AlarmError(Exception):
            pass

        def ring(*_):
            raise AlarmError

        weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        parameter = ops.parameter([-1, 64], np.float32, name="x")
        product = ops.matmul(parameter, ops.constant(weight), False, False)
        run = Runner(ov.Model([product], [parameter], "dense"), streams={streams})
        signal.signal(signal.SIGALRM, ring)
        draw, interrupts = random.Random(0), 0
        for attempt in range(300):
            # Some shapes are new, and run asynchronously.
            x = np.full((1 + attempt % 40, 64), attempt, np.float32)
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(5e-5, 1.5e-3))
                for _ in range(10_000):  # more than the timer allows
                    run([x])
            except AlarmError:
                interrupts += 1
        x = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)
        with ThreadPoolExecutor(4) as pool:
            for (output,) in pool.map(run, [[x]] * 8):
                np.testing.assert_allclose(output, x @ weight, rtol=1e-4, atol=1e-4)
        print(interrupts)
    """
    # An exception within a finalizer is lost.
    assert int(run_alone(code)) > 290


def test_threads_may_use_a_type_for_the_first_time_at_once():
    code = """
        import sys, threading
        import numpy as np
        from neural_mp.adaptors.openvino.runtime import get_core, get_numpy_dtype, ops, ov

        sys.setswitchinterval(1e-6)
        barrier = threading.Barrier(4)

        def use_types():
            barrier.wait()
            assert get_numpy_dtype(ov.Type.i64) == np.int64
            parameter = ops.parameter([2, 4], np.float32)
            weight = ops.constant(np.ones((4, 4), np.float32))
            product = ops.matmul(parameter, weight, False, False)
            request = get_core().compile_model(ov.Model([product], [parameter]), "CPU")
            request([np.ones((2, 4), np.float32)])

        threads = [threading.Thread(target=use_types) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print("done")
    """
    assert run_alone(code) == "done\n"


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs user signals")
def test_signals_are_handled_after_another_thread_has_dropped_a_model():
    """On CPUs with AMX, OpenVINO's plugin frees a stack on which signals of its thread run."""
    code = """
        import signal, threading
        import numpy as np
        from neural_mp.adaptors.openvino.runtime import Runner, ops, ov

        def make_counter():
            parameter = ops.parameter([1, 4], np.float32, name="x")
            variable = ov.op.util.VariableInfo()
            variable.data_shape, variable.data_type = ov.PartialShape([1, 4]), ov.Type.f32
            variable.variable_id = "sum"
            state = ov.op.util.Variable(variable)
            total = ops.add(parameter, ops.read_value(ops.constant(np.zeros((1, 4), "f")), state))
            return ov.Model([total.output(0)], [ops.assign(total, state)], [parameter], "counter")

        models = [Runner(make_counter()), Runner(make_counter())]
        for _ in range(2):
            models[0]([np.ones((1, 4), np.float32)])
        dropping = threading.Thread(target=models.clear)
        dropping.start()
        dropping.join()
        signals = []
        signal.signal(signal.SIGUSR1, lambda number, frame: signals.append(number))
        signal.raise_signal(signal.SIGUSR1)
        print(len(signals))
    """
    assert run_alone(code) == "1\n"
