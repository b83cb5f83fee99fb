"""Code of a package of pure functions is interrupted after its CPU seconds; other code is not."""

import threading
import time

import pytest
import sympy

from neural_mp.util.interruption import TimeLimitError, interrupted_after


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
    begun = time.monotonic()
    with pytest.raises(TimeLimitError) as caught, interrupted_after(0.1, within="sympy"):
        grow_expressions(begun + 60)
    assert time.monotonic() - begun < 30
    assert caught.value.seconds == 0.1


def test_other_code_and_other_threads_are_not_interrupted():
    end = time.monotonic() + 0.5
    thread = threading.Thread(target=grow_expressions, args=(end,))
    thread.start()
    with interrupted_after(0.05, within="sympy"):
        while time.monotonic() < end:
            sum(range(1000))
    thread.join()


def test_nothing_is_raised_after_the_end():
    with interrupted_after(0.05, within="sympy"):
        sympy.expand((sympy.Symbol("x") + 1) ** 3)
    grow_expressions(time.monotonic() + 0.3)
