"""Dataclasses as JSON: written field by field, and read by their annotations.

A library would report all mistakes of a hostile file, a kilobyte each, where the first suffices;
and importing pydantic takes longer than validating the record of a large run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from types import MappingProxyType, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, Union, get_args, get_origin, get_type_hints

from neural_mp.util.string_enum import StringEnum
from neural_mp.util.validators import (
    Validator,
    anything,
    boolean,
    enum_of,
    finite,
    integer,
    keep_original_value,
    list_of,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    record,
    string,
    tuple_of,
)

S = TypeVar("S", bound="JsonFields")

#: Annotations of fields; integers stay integers.
Count = Annotated[int, non_negative_integer]
Finite = Annotated[float, keep_original_value(finite)]
NonNegative = Annotated[float, keep_original_value(non_negative_float)]

#: Metadata of a field that is neither written nor read.
NOT_STORED: Mapping[str, bool] = MappingProxyType({"stored": False})

_PRIMITIVES = (str, int, float, bool, type(None))
_VALIDATORS: Mapping[Any, Validator[Any]] = {
    **{str: string, bool: boolean, int: integer, float: number},
    Any: anything,
}


class JsonFields:
    """A dataclass with a JSON form: an object with a key per field.

    A field is read by its annotation, in which `Annotated[type, validator]` overrides the validator
    of the type; a missing field that may be missing takes its default.
    """

    #: Fields whose key may be missing; None: all that have a default.
    optional_keys: ClassVar[Collection[str] | None] = None
    #: Whether fields that may be missing and have their default are left out.
    omits_defaults: ClassVar[bool] = False
    #: Whether unknown keys are errors.
    refuses_unknown_keys: ClassVar[bool] = False

    def to_dict(self) -> dict[str, Any]:
        """Return plain numbers, strings, lists and dicts."""
        return {
            item.name: to_plain(getattr(self, item.name))
            for item in _list_stored_fields(type(self))
            if not (self.omits_defaults and _may_be_missing(type(self), item))
            or getattr(self, item.name) != _get_field_default(item)
        }

    @classmethod
    def from_dict(cls: type[S], data: object) -> S:
        """Read the result of `to_dict`.

        Raises:
            NeuralMPError: the data are invalid.
        """
        return cls(**_build_validator(cls)(data))  # type: ignore[arg-type]  # classes are hashable


def to_plain(value: Any) -> Any:
    """Return a value as numbers, strings, lists and dicts."""
    if type(value) in _PRIMITIVES:
        return value
    if isinstance(value, StringEnum):
        return value.value
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, frozenset):
        return sorted(map(to_plain, value))
    return value.tolist()  # a number or an array of numpy


def build_field_validators(
    kind: type, without: Collection[str] = ()
) -> tuple[dict[str, Validator[Any]], dict[str, Validator[Any]]]:
    """Return field → validator, for the required and for the optional fields of a dataclass."""
    hints = get_type_hints(kind, include_extras=True)
    required: dict[str, Validator[Any]] = {}
    extra: dict[str, Validator[Any]] = {}
    for item in _list_stored_fields(kind):
        if item.name not in without:
            validators = extra if _may_be_missing(kind, item) else required
            validators[item.name] = _build_hint_validator(hints[item.name])
    return required, extra


@cache
def _build_validator(kind: type[JsonFields]) -> Validator[dict[str, Any]]:
    return record(*build_field_validators(kind), strict=kind.refuses_unknown_keys)


def _list_stored_fields(kind: Any) -> list[Field[Any]]:
    return [item for item in fields(kind) if item.metadata.get("stored", True)]


def _may_be_missing(kind: type, item: Field[Any]) -> bool:
    names = getattr(kind, "optional_keys", None)
    return _get_field_default(item) is not MISSING and (names is None or item.name in names)


def _get_field_default(item: Field[Any]) -> Any:
    """Return the default of a field; `MISSING` without any."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def _build_hint_validator(hint: Any) -> Validator[Any]:
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return parts[1]
    if origin in (Union, UnionType):
        (kind,) = (part for part in parts if part is not type(None))
        return optional(_build_hint_validator(kind))
    if origin is Mapping:
        return mapping_of(_build_hint_validator(parts[1]), _build_hint_validator(parts[0]))
    if origin is tuple:
        if parts[-1] is Ellipsis:
            return list_of(_build_hint_validator(parts[0]))
        return tuple_of(*map(_build_hint_validator, parts))
    if hint in _VALIDATORS:
        return _VALIDATORS[hint]
    read: Callable[[Any], Any] = enum_of(hint) if issubclass(hint, StringEnum) else hint.from_dict
    return read
