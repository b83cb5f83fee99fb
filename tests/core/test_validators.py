"""Refusals of a validator: one line for files and options, however large the value."""

from pathlib import Path

import numpy as np
import pytest

from neural_mp.errors import ConfigurationError, DataError
from neural_mp.util.validators import (
    InvalidValueError,
    boolean,
    file_path,
    finite,
    format_located_error,
    integer_between,
    list_of,
    mapping_of,
    one_of,
    preview_value,
    record,
    validate_option,
)


@pytest.mark.parametrize(
    ("validator", "value", "message"),
    [
        (boolean, 1, "x must be true or false, got 1"),
        (integer_between(1, 9), 10, "x must be a whole number from 1 to 9, got 10"),
        (list_of(finite), [1, "a"], "each of x must be a finite number, got 'a'"),
        (one_of(("mean", "sum")), "maen", "x must be one of mean, sum, got 'maen'; did you mean"),
        (file_path, 3, "x must be a path, got 3"),
    ],
)
def test_an_option_is_named_with_what_it_must_be(validator, value, message):
    with pytest.raises(ConfigurationError) as caught:
        validate_option("x", validator, value)
    assert str(caught.value).startswith(message)
    with pytest.raises(DataError, match="must be"):
        validate_option("x", validator, value, DataError)


def test_numbers_of_numpy_are_taken_as_those_of_python():
    value = validate_option("x", integer_between(1), np.int64(3))
    assert (type(value), value) == (int, 3)
    value = validate_option("x", finite, np.float32(0.5))
    assert (type(value), value) == (float, 0.5)


def test_an_error_names_all_keys_on_the_way():
    with pytest.raises(InvalidValueError) as caught:
        record({"a": mapping_of(list_of(finite))}, {"b": boolean})({"a": {"k": [1.0, None]}})
    assert format_located_error(caught.value) == "a.k.1: expected a finite number, found None"


LARGE = {
    "text": "x" * 10**6,
    "bytes": b"x" * 10**6,
    "list": [[[[["x"]]]]] * 10**6,
    "mapping": {i: "x" for i in range(10**6)},
    "number": 10**10_000,
    "number in a list": [10**10_000],
    "text in a tuple": (("x" * 10**6,),),
}


@pytest.mark.parametrize("value", LARGE.values(), ids=LARGE)
def test_a_value_is_shown_in_a_line(value):
    assert len(preview_value(value)) <= 80


def test_a_small_value_is_shown_whole():
    assert preview_value({"a": [1, "b"]}) == "{'a': [1, 'b']}"


def test_a_path_in_a_folder_that_may_not_be_entered_is_one_error(monkeypatch, tmp_path):
    """`Path.exists` and its like raise `PermissionError` there, which root never gets."""

    def refuse(self, **_):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(ConfigurationError, match="in folders that you may enter, got '"):
        validate_option("model", file_path, tmp_path / "net.onnx")
