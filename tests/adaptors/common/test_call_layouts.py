"""Inputs of a known layout are bound without checks, and equal to checked ones."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from neural_mp.adaptors.common.signatures.boundary import Boundary
from neural_mp.adaptors.common.signatures.signature import MAX_LAYOUTS, Signature, TensorSpec
from neural_mp.errors import DataError

FLOAT = np.dtype(np.float32)


def signature(*names: str) -> Signature:
    inputs = tuple(TensorSpec(name, f"t_{name}", FLOAT, (None, 3)) for name in names)
    return Signature(inputs, (TensorSpec("y", "t_y", FLOAT, None),))


def rows(value: float, dtype: Any = FLOAT, count: int = 2) -> np.ndarray:
    return np.full((count, 3), value, dtype)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The batches that were checked."""
    batches: list[object] = []
    checked = Signature.assign_inputs

    def assigned(self: Signature, inputs: object) -> list[Any]:
        batches.append(inputs)
        return checked(self, inputs)

    monkeypatch.setattr(Signature, "assign_inputs", assigned)
    return batches


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,), lambda x: [x], lambda x: {"a": x}])
def test_a_layout_is_checked_once(checks: list[object], wrap: Any) -> None:
    model = signature("a")
    for value in range(3):
        assert model.bind_inputs(wrap(rows(value)))["t_a"][0, 0] == value
    assert len(checks) == 1
    model.bind_inputs(wrap(rows(0, count=5)))
    assert len(checks) == 2


def test_names_decide_not_the_order(checks: list[object]) -> None:
    model = signature("a", "b")
    for _ in range(2):
        feeds = model.bind_inputs({"b": rows(2), "a": rows(1), "labels": rows(3)})
        assert {name: array[0, 0] for name, array in feeds.items()} == {"t_a": 1, "t_b": 2}
    assert len(checks) == 1
    feeds = model.bind_inputs({"labels": rows(3), "a": rows(1), "b": rows(2)})
    assert {name: array[0, 0] for name, array in feeds.items()} == {"t_a": 1, "t_b": 2}


def test_an_array_given_twice_tells_nothing_about_the_next_batch() -> None:
    model, same = signature("a"), rows(1)
    model.bind_inputs({"labels": same, "a": same})
    assert model.bind_inputs({"labels": rows(3), "a": rows(2)})["t_a"][0, 0] == 2


def test_other_dtypes_are_converted_in_every_call(checks: list[object]) -> None:
    model = signature("a")
    for value in range(3):
        array = model.bind_inputs(rows(value, np.float64))["t_a"]
        assert array.dtype == FLOAT
        assert array[0, 0] == value
    assert len(checks) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (rows(1, complex), "array of complex128"),
        (np.zeros((2, 4), FLOAT), "matching sizes"),
        ({"c": rows(1)}, "no input 'c'"),
        ((rows(1), rows(2)), "1 input"),
    ],
)
def test_wrong_inputs_fail_after_right_ones(wrong: object, said: str) -> None:
    model = signature("a")
    for right in (rows(1), {"a": rows(1)}, (rows(1),)):
        model.bind_inputs(right)
    for _ in range(2):
        with pytest.raises(DataError, match=said):
            model.bind_inputs(wrong)


def test_the_number_of_layouts_is_bounded(checks: list[object]) -> None:
    model = signature("a")
    for count in range(1, MAX_LAYOUTS + 10):
        model.bind_inputs(rows(0, count=count))
    checks.clear()
    model.bind_inputs(rows(0, count=MAX_LAYOUTS + 9))
    assert len(checks) == 1


def test_a_signature_with_known_layouts_is_the_same() -> None:
    model = signature("a")
    expected = model.to_dict()
    model.bind_inputs(rows(1))
    assert model.to_dict() == expected
    assert model == signature("a") == pickle.loads(pickle.dumps(model))


def test_a_boundary_assigns_a_layout_once(checks: list[object]) -> None:
    boundary = Boundary("onnxrt", signature("a", "b"))
    boundary.bind_inputs({"b": rows(2), "a": rows(1)})
    checks.clear()
    arrays, tensors = boundary.bind_inputs({"b": rows(4), "a": rows(3)})
    assert [array[0, 0] for array in arrays] == [3, 4]
    assert not tensors
    assert not checks
    assert pickle.loads(pickle.dumps(boundary)) == boundary
