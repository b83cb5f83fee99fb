"""The gate through which the user's own code is called, and the way out of it."""

import builtins
import functools
import pickle
import sys
import traceback

import cloudpickle
import pytest

from neural_mp.errors import DataError, MetricError, is_users_own
from neural_mp.util.remote_exceptions import dump_exception
from neural_mp.util.user_calls import ReraiseUserErrors, UserCodeError, call_user


class OwnError(Exception):
    pass


class NeedsTwoError(Exception):
    def __init__(self, first, second):
        super().__init__(f"{first} {second}")


class DeepError(DataError):
    pass


def raising(error):
    def act(*_):
        raise error

    return act


@pytest.mark.parametrize(
    "kind", [OwnError, TypeError, StopIteration, SystemExit, GeneratorExit, DeepError, DataError]
)
def test_what_users_raise_comes_out_as_that_object(kind):
    error = kind("mine")
    error.__cause__ = cause = KeyError("why")
    with pytest.raises(kind) as caught, ReraiseUserErrors():
        call_user(raising(error), form="act()", kind=MetricError)
    assert caught.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert traceback.extract_tb(error.__traceback__)[-1].name == "act"


def test_an_error_of_a_class_of_ours_is_ours_and_one_derived_from_it_is_not():
    for kind, own in ((DataError, False), (DeepError, True), (OwnError, True)):
        with pytest.raises(kind) as caught, ReraiseUserErrors():
            call_user(raising(kind("mine")))
        assert is_users_own(caught.value) is own


@pytest.mark.parametrize(
    ("function", "takes"),
    [
        (lambda: 1, r"takes \(\)"),
        (lambda a, b: 1, r"takes \(a, b\)"),
        (lambda *, a: 1, r"takes \(\*, a\)"),
        (functools.partial(lambda a, b, c: 1, 2), r"takes \(b, c\)"),
        (int, "takes"),
    ],
)
def test_a_call_of_ours_that_does_not_fit_is_said_with_both_forms(function, takes):
    with pytest.raises(MetricError, match=rf"the call f\(x\).*{takes}"):
        call_user(function, object(), form="f(x)", kind=MetricError)


def test_a_call_of_theirs_that_does_not_fit_is_theirs():
    def inner():
        pass

    with pytest.raises(UserCodeError):
        call_user(lambda x: inner(x), 1, form="f(x)", kind=MetricError)


def test_an_interrupt_is_nobodys_error():
    with pytest.raises(KeyboardInterrupt):
        call_user(raising(KeyboardInterrupt()))


def sent(error):
    return pickle.loads(pickle.dumps(dump_exception(error))).rebuild_exception()


def test_an_exception_is_sent_with_its_cause_its_notes_and_its_places():
    def outer():
        try:
            {}["why"]
        except KeyError as error:
            found = OwnError("mine")
            found.add_note("a note")
            raise found from error

    with pytest.raises(OwnError) as caught:
        outer()
    copy = sent(caught.value)
    assert type(copy) is OwnError
    assert copy.args == ("mine",)
    assert copy.__notes__ == ["a note"]
    assert isinstance(copy.__cause__, KeyError)
    expected, actual = (
        [(frame.filename, frame.name, frame.lineno) for frame in traceback.extract_tb(trace)]
        for trace in (caught.value.__traceback__, copy.__traceback__)
    )
    assert actual == expected
    assert "raise found from error" in "".join(traceback.format_exception(copy))


class HoldsALambdaError(Exception):
    def __reduce__(self):
        raise TypeError("cannot be copied")


@pytest.mark.parametrize("error", [NeedsTwoError("no", "luck"), HoldsALambdaError("mine")])
def test_an_exception_that_python_cannot_copy_is_of_the_same_class(error):
    with pytest.raises(Exception, match=".*"):
        pickle.loads(pickle.dumps(error))
    copy = sent(error)
    assert type(copy) is type(error)
    assert str(copy) == str(error)


def test_an_exception_that_names_itself_as_its_cause_is_sent():
    error = OwnError("mine")
    error.__context__ = KeyError("why")
    error.__context__.__context__ = error
    copy = cloudpickle.loads(cloudpickle.dumps(dump_exception(error))).rebuild_exception()
    assert str(copy) == "mine"
    assert isinstance(copy.__context__, KeyError)
    assert copy.__context__.__context__ is copy


def test_each_of_many_exceptions_that_led_to_one_is_sent_once():
    last = KeyError("why")
    for level in range(2000):
        error = OwnError(str(level))
        error.__cause__ = error.__context__ = last  # as `raise error from last` leaves it
        last = error
    copy = sent(last)
    assert copy.__cause__ is copy.__context__
    chain = [copy]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    assert len(chain) == 2001
    assert isinstance(chain[-1], KeyError)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there are no groups of exceptions")
def test_a_group_of_exceptions_is_sent_with_all_that_is_known_of_each():
    first = HoldsALambdaError("mine")
    first.add_note("a note")
    first.__cause__ = KeyError("why")
    inner = builtins.ExceptionGroup("inner", [NeedsTwoError("no", "luck")])
    error = builtins.ExceptionGroup("outer", [first, inner])
    copy = sent(error)
    assert type(copy) is builtins.ExceptionGroup
    assert str(copy) == str(error)
    assert [type(member) for member in copy.exceptions] == [
        HoldsALambdaError,
        builtins.ExceptionGroup,
    ]
    assert copy.exceptions[0].__notes__ == ["a note"]
    assert isinstance(copy.exceptions[0].__cause__, KeyError)
    assert str(copy.exceptions[1].exceptions[0]) == "no luck"


class WordlessError(Exception):
    def __str__(self):
        raise ValueError("there are no words")


def test_an_exception_that_raises_as_it_is_shown_comes_out_as_that_object():
    error = WordlessError()
    with pytest.raises(WordlessError) as caught, ReraiseUserErrors():
        call_user(raising(error))
    assert caught.value is error
    assert type(sent(error)) is WordlessError
