"""Exceptions of signal handlers come through errors of this package unchanged."""

import functools
import signal
import threading

import pytest

from neural_mp.errors import ConversionError, ModelLoadError, is_users_own

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="needs user signals")


class TooSlowError(Exception):
    """Raised by handlers."""


def refuse(*_):
    raise TooSlowError


class Handler:
    def __call__(self, *_):
        refuse()

    def refuse(self, *_):
        refuse()


@pytest.fixture(params=[refuse, functools.partial(refuse, 1), Handler(), Handler().refuse])
def handled(request):
    previous = signal.signal(signal.SIGUSR1, request.param)
    yield
    signal.signal(signal.SIGUSR1, previous)


def interrupted():
    """Be interrupted in a framework, which wraps the exception."""
    try:
        signal.raise_signal(signal.SIGUSR1)
    except TooSlowError as error:
        raise RuntimeError("the framework failed") from error


def refuse_directly():
    raise TooSlowError


def load_by_framework(call):
    """Wrap an exception twice, as kernels and models do."""
    try:
        try:
            call()
        except Exception as error:
            raise ConversionError("the kernel fails") from error
    except ConversionError as error:
        raise ModelLoadError("the model fails") from error


@pytest.mark.usefixtures("handled")
def test_an_error_that_would_wrap_a_handlers_exception_is_that_exception():
    with pytest.raises(TooSlowError) as caught:
        load_by_framework(interrupted)
    assert is_users_own(caught.value)


@pytest.mark.usefixtures("handled")
def test_other_causes_are_wrapped_although_a_handler_is_installed():
    with pytest.raises(ModelLoadError, match="the model fails") as caught:
        load_by_framework(refuse_directly)
    assert isinstance(caught.value.__cause__, ConversionError)


@pytest.mark.usefixtures("handled")
def test_errors_of_other_threads_are_those_of_this_package():
    errors = []

    def fail():
        try:
            refuse()
        except TooSlowError:
            errors.append(ConversionError("the kernel fails"))

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    assert [str(error) for error in errors] == ["the kernel fails"]
