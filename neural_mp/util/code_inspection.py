"""Static inspection of the code of functions, classes and objects."""

from __future__ import annotations

import dis
import enum
import functools
import math
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

#: Methods whose attributes are options; attributes set by others are state.
_CONSTRUCTOR_METHODS = frozenset(("__init__", "__new__", "__post_init__", "build"))
#: Larger numbers are times, sizes or process ids rather than options.
_MAX_OPTION_VALUE = 1e6
_MAX_OPTION_CHARS = 200
#: Packages in which lists and dicts set only once are options.
_METRIC_PACKAGES = ("neural_mp.metrics", "neural_mp.compat")
#: Methods that add batches to a metric.
_UPDATE_METHODS = ("update", "update_state", "add_batch")
SCALAR_TYPES = (bool, int, float, complex, str, bytes, type(None), type(...), Path)
#: Types of options, in any package and in this one.
_OPTION_TYPES = (
    *SCALAR_TYPES,
    enum.Enum,
    np.generic,
    tuple,
    frozenset,
    type,
    functools.partial,
    types.FunctionType,
    types.MethodType,
)
_OWN_OPTION_TYPES = (*_OPTION_TYPES, list, dict, np.ndarray)

_LIBRARIES = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    Path(__file__).parent.parent,
)


def is_library_module(module: str | None) -> bool:
    """Whether a module belongs to Python, an installed package, or this package."""
    imported = None if module is None else sys.modules.get(module)
    if imported is None or module == "__main__":
        return False
    file = getattr(imported, "__file__", None)
    if file is None:  # built in, or a namespace package
        return module in sys.builtin_module_names
    return any(Path(file).is_relative_to(folder) for folder in _LIBRARIES)


def is_stable(value: Any) -> bool:
    """Whether a scalar probably is equal in the next process if the user changes nothing."""
    if isinstance(value, bool | enum.Enum | type(None) | type(...)):
        return True
    if isinstance(value, int | float):
        return not math.isfinite(value) or abs(value) < _MAX_OPTION_VALUE
    if isinstance(value, str):
        return len(value) <= _MAX_OPTION_CHARS and not ("/" in value or "\\" in value)
    return False


def is_metric(value: Any) -> bool:
    """Whether an object is a metric, judged by its methods."""

    def has_any(*names: str) -> bool:
        return any(callable(getattr(type(value), name, None)) for name in names)

    return has_any("result", "compute") and has_any(*_UPDATE_METHODS)


def is_own_metric(value: Any) -> bool:
    """Whether an object's package uses lists and dicts as options."""
    return type(value).__module__.startswith(_METRIC_PACKAGES)


def options_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that only its constructor sets, sorted by name."""
    kind = type(value)
    library, own = is_library_module(kind.__module__), is_own_metric(value)
    if library and callable(getattr(value, "get_config", None)):
        # Keras numbers its objects in their names.
        config: dict[str, Any] = _without_names(value.get_config())
        return dict(sorted(config.items()))
    slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    mutated = mutated_attributes(kind)
    return {
        name: option
        for name, option in sorted(attributes.items())
        if name not in mutated
        and not name.startswith("__")
        and not (library and not own and name.startswith("_"))
        # A method replaced on the instance, e.g. by a test.
        and not callable(getattr(kind, name, None))
        and not isinstance(getattr(kind, name, None), functools.cached_property)
        and (
            isinstance(option, _OWN_OPTION_TYPES if own else _OPTION_TYPES)
            or is_metric(option)
            # The code of user-defined objects is hashed.
            or not is_library_module(type(option).__module__)
        )
    }


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return config


def names_of(code: types.CodeType, *operations: str) -> set[str]:
    """Return names used by the given bytecode operations, including inner functions."""
    return {
        str(instruction.argval)
        for part in _parts(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in operations
    }


def all_names_of(code: types.CodeType) -> set[str]:
    """Return names of globals and attributes in a function, including inner functions."""
    return {name for part in _parts(code) for name in part.co_names}


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def mutated_attributes(kind: type) -> set[str]:
    """Return the attributes that methods set after construction."""
    return {
        attribute
        for base in kind.__mro__
        for name, member in vars(base).items()
        if name not in _CONSTRUCTOR_METHODS
        for function in _functions(member)
        for attribute in names_of(function.__code__, "STORE_ATTR")
    }


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        yield from _functions(member.fget)
        yield from _functions(member.fset)
    elif isinstance(member, types.FunctionType):
        yield member
        yield from _functions(getattr(member, "__wrapped__", None))
