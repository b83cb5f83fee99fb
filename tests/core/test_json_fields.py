"""Dataclasses written as JSON and read by their annotations."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

import numpy as np
import pytest

from neural_mp.core.precision import Precision
from neural_mp.util.json_fields import NOT_STORED, Count, Finite, JsonFields, NonNegative
from neural_mp.util.validators import InvalidValueError, format_located_error, one_of


@dataclass(frozen=True)
class Layer(JsonFields):
    refuses_unknown_keys: ClassVar[bool] = True

    name: str
    kind: Annotated[str, one_of(("conv", "dense"))] = "conv"


@dataclass(frozen=True)
class Net(JsonFields):
    layers: tuple[Layer, ...]
    count: Count = 0
    span: tuple[Finite, Finite] | None = None
    seconds: Mapping[Precision, NonNegative] = field(default_factory=dict)
    rows: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    exact: bool = False
    cache: object = field(default=None, compare=False, metadata=NOT_STORED)


class SparseNet(Net):
    omits_defaults: ClassVar[bool] = True


class FullNet(Net):
    """Only the span and the rows may be missing in a file."""

    optional_keys: ClassVar = ("span", "rows")
    omits_defaults: ClassVar[bool] = True


NET = Net((Layer("a"), Layer("b", "dense")), 2, (-1, 0.5), {Precision.INT8: 0.25}, {"a": (1, 2)})
WRITTEN = {
    "layers": [{"name": "a", "kind": "conv"}, {"name": "b", "kind": "dense"}],
    "count": 2,
    "span": [-1, 0.5],
    "seconds": {"int8": 0.25},
    "rows": {"a": [1, 2]},
    "exact": False,
}


def test_fields_are_written_as_plain_json_and_read_back():
    assert json.dumps(NET.to_dict()) == json.dumps(WRITTEN)
    restored = Net.from_dict(json.loads(json.dumps(WRITTEN)))
    assert restored == NET
    assert next(iter(restored.seconds)) is Precision.INT8


def test_a_missing_field_takes_its_default_and_an_unknown_key_is_dropped():
    assert Net.from_dict({"layers": [], "cache": 1, "later": 2}) == Net(())
    assert SparseNet((), count=1).to_dict() == {"layers": [], "count": 1}


def test_a_default_spares_no_key_that_a_file_must_have():
    written = {"layers": [], "count": 0, "seconds": {}, "exact": False}
    assert FullNet(()).to_dict() == written
    assert FullNet.from_dict(written) == FullNet(())
    for key in written:
        part = {name: value for name, value in written.items() if name != key}
        with pytest.raises(InvalidValueError, match=f"expected the key '{key}'"):
            FullNet.from_dict(part)


def test_numbers_of_numpy_are_written_as_those_of_python():
    written = Net((), np.int64(3), (np.float32(0.5), np.float64(1))).to_dict()
    assert json.dumps([written["count"], written["span"]]) == "[3, [0.5, 1.0]]"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": {}}, "layers: expected a list, found {}"),
        ({"layers": [{}]}, "layers.0: expected the key 'name', found {}"),
        ({"layers": [{"name": 1}]}, "layers.0.name: expected a string, found 1"),
        ({"layers": [{"name": "a", "type": 1}]}, "layers.0: unknown key 'type'"),
        ({"layers": [{"name": "a", "kind": "x"}]}, "layers.0.kind: expected one of conv, dense,"),
        ({"count": -1}, "count: expected a whole number from 0, found -1"),
        ({"count": True}, "count: expected a whole number from 0, found True"),
        ({"span": [1]}, "span: expected a list of 2, found [1]"),
        ({"span": [1, float("nan")]}, "span.1: expected a finite number, found nan"),
        ({"seconds": {"int9": 1}}, "seconds.int9: expected one of int2,"),
        ({"seconds": {"int8": -1}}, "seconds.int8: expected a finite number from 0, found -1"),
        ({"exact": 1}, "exact: expected true or false, found 1"),
    ],
)
def test_a_mistake_is_named_with_its_keys(change, message):
    with pytest.raises(InvalidValueError) as caught:
        Net.from_dict(WRITTEN | change)
    assert format_located_error(caught.value).startswith(message)
