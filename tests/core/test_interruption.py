"""Code of a package of pure functions is interrupted after its CPU seconds; other code is not."""

import importlib
import math
import textwrap
import threading
import time

import pytest
import sympy
from still_clock import StillClock

from neural_mp.util.system import watched_thread
from neural_mp.util.system.watched_thread import TimeLimitError, interrupt_after_seconds


def grow_expressions(end: float) -> None:
    """Simplify expressions until an end on the clock, catching every ordinary exception."""
    x, y = sympy.symbols("x y", integer=True, positive=True)
    while time.monotonic() < end:
        try:
            sympy.expand((x + y) ** 12)
            sympy.core.cache.clear_cache()
        except Exception:  # noqa: BLE001 - as code of packages does
            continue


def test_code_of_the_package_is_interrupted():
    with pytest.raises(TimeLimitError) as caught, interrupt_after_seconds(0.1, within="sympy"):
        grow_expressions(math.inf)
    assert caught.value.seconds == 0.1


def test_other_code_and_other_threads_are_not_interrupted():
    end = time.monotonic() + 0.5
    thread = threading.Thread(target=grow_expressions, args=(end,))
    thread.start()
    with interrupt_after_seconds(0.05, within="sympy"):
        while time.monotonic() < end:
            sum(range(1000))
    thread.join()


def test_nothing_is_raised_after_the_end(monkeypatch):
    """The limit passes right after the end, by the clock of the watcher."""
    clock = StillClock()
    monkeypatch.setattr(watched_thread, "_read_clock_seconds", lambda _: clock.now)
    with interrupt_after_seconds(0.05, within="sympy"):
        sympy.expand((sympy.Symbol("x") + 1) ** 3)
    clock.sleep(1)
    grow_expressions(time.monotonic() + 0.3)


def test_imports_are_not_interrupted_but_code_that_runs_within_one_is(tmp_path, monkeypatch):
    """An interrupted import leaves modules without their parts for the rest of the process."""
    package = tmp_path / "pure_functions"
    package.mkdir()
    spin = """
    import time

    def spin(seconds):
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass
    """
    (package / "__init__.py").write_text("from pure_functions.part import spin\nspin(0.5)\n")
    (package / "part.py").write_text(textwrap.dedent(spin))
    monkeypatch.syspath_prepend(tmp_path)
    with interrupt_after_seconds(0.05, within="pure_functions"):
        module = importlib.import_module("pure_functions")
    assert callable(module.spin)
    (tmp_path / "runs_on_import.py").write_text(
        "from neural_mp.util.system.watched_thread import interrupt_after_seconds\n"
        "from pure_functions import spin\n"
        "with interrupt_after_seconds(0.05, within='pure_functions'):\n"
        "    spin(60)\n"
    )
    with pytest.raises(TimeLimitError):
        importlib.import_module("runs_on_import")
