"""What a user's metric or function does, told in the same way in another process and another run.

`identity` tells objects apart by all that they are, so it tells a metric that has counted
something from one that has not. Here it is asked whether two of them measure the same. What counts
is code, and what was said as the object was made; what changes as it is used does not.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import logging
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.util.fingerprint import digest_of, is_of_library

logger = logging.getLogger(__name__)

#: What sets attributes as an object is made; what others set is what it has taken in.
_MAKERS = frozenset(("__init__", "__new__", "__post_init__", "build"))
#: Numbers beyond are times, sizes or numbers of processes rather than options.
_LARGEST = 1e6
_LONGEST = 200
#: Functions, classes and objects that are looked at before it is given up.
_MOST = 5000
#: Packages of which it is known that lists and dicts that are set once are options.
_PACKAGES = ("neural_mp.metrics", "neural_mp.compat")
#: Methods by which metrics take in batches.
_TAKES = ("update", "update_state", "add_batch")
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type(...))


@dataclass(frozen=True)
class Behaviour:
    """What something does.

    Attributes:
        digest: equal for what does the same, under one version of Python.
        options: name → what was said as it was made, in words.
    """

    digest: str
    options: Mapping[str, str] = field(default_factory=dict)


def behaviour(value: Any) -> Behaviour | None:
    """What a metric, a function or a list of them does; None where it cannot be told.

    Of functions and classes of the user's that is their bytecode, with constants, defaults, and the
    functions, classes and plain values that they refer to; of an object its class, and the plain
    values that only its constructor sets. What a library holds counts by its name. Arrays, files,
    models, paths, and lists and dicts that may be filled on the way count for nothing.
    """
    telling = _Telling()
    try:
        telling.tell(value, opened=True)
    except Exception:
        # Whatever the user's own objects raise when they are looked at.
        logger.debug("it cannot be told what %r does", type(value), exc_info=True)
        return None
    return Behaviour(telling.digest.hexdigest(), telling.options)


class _TooMuchError(Exception):
    """It would take too long; caught by `behaviour`."""


class _Telling:
    """Feeds what something does into a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.options: dict[str, str] = {}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is that of another object once its owner is gone

    def tell(self, value: Any, opened: bool = False) -> None:
        """Take something in.

        Args:
            value: it.
            opened: whether options of an object count, and items of a list; code refers to much
                else, and what is in there changes.
        """
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, enum.Enum):
            self._say("enum", type(value).__qualname__, str(value.name))
            self.tell(value.value)
        elif isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value) if _lasts(value) else "")
        elif isinstance(value, tuple | frozenset):
            self._each(type(value).__name__, value, opened)
        elif isinstance(value, types.MethodType):
            self._say("method")
            self.tell(value.__func__)
            self.tell(value.__self__, opened)
        elif opened and isinstance(value, list):
            self._each("list", value, opened)
        elif opened and isinstance(value, dict):
            self._items(value, opened)
        elif id(value) in self._seen:
            self._say("again", str(self._seen[id(value)]))
        else:
            self._first(value, opened)

    def _first(self, value: Any, opened: bool) -> None:
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        if len(self._seen) > _MOST:
            raise _TooMuchError
        if isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, functools.partial):
            self._say("partial")
            self.tell(value.func, opened)
            self.tell(value.args)
            self._items(value.keywords, opened=False)
        elif isinstance(value, staticmethod | classmethod):
            self._say(type(value).__name__)
            self.tell(value.__func__)
        elif isinstance(value, property):
            self._each("property", (value.fget, value.fset))
        elif isinstance(value, functools.cached_property):
            self.tell(value.func)
        elif isinstance(value, types.BuiltinFunctionType | types.ModuleType):
            self._say("builtin", value.__name__)
        else:
            self._object(value, opened)

    def _say(self, *words: str) -> None:
        for word in words:
            self.digest.update(f"{len(word)}:{word};".encode("utf-8", "surrogatepass"))

    def _each(self, kind: str, values: Iterable[Any], opened: bool = False) -> None:
        found = list(values)
        if isinstance(values, frozenset):
            found = sorted(found, key=_place)
        self._say(kind, str(len(found)))
        for value in found:
            self.tell(value, opened)

    def _items(self, items: Mapping[Any, Any], opened: bool) -> None:
        names = sorted(items, key=str)
        self._say("items", *map(str, names))
        for name in names:
            self.tell(items[name], opened)

    def _function(self, function: types.FunctionType) -> None:
        if is_of_library(function.__module__) and "<locals>" not in function.__qualname__:
            self._say("library", function.__module__, function.__qualname__)
            return
        code = function.__code__
        self._say("function", function.__qualname__)
        self._code(code)
        self.tell(function.__defaults__)
        self._items(function.__kwdefaults__ or {}, opened=False)
        changing = _stored(code, "STORE_DEREF")
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        held = dict(_contents(cells, changing))
        self._say("items", *sorted(held))
        for name in sorted(held):
            self._named(name, held[name], code)
        self._globals(code, function.__globals__)

    def _globals(self, code: types.CodeType, known: Mapping[str, Any]) -> None:
        """What a function refers to by name, in its module and in the user's other modules."""
        changing = _stored(code, "STORE_GLOBAL")
        named = _stored(code, "LOAD_GLOBAL") | _stored(code, "LOAD_NAME")
        for name in sorted((named - changing) & known.keys()):
            self._say("global", name)
            self._named(name, known[name], code)

    def _module(
        self, module: types.ModuleType, names: Set[str], above: tuple[types.ModuleType, ...] = ()
    ) -> None:
        """What a function may refer to in a module of the user's, and in the modules in it."""
        if is_of_library(module.__name__) or module in above:
            return
        for name in sorted(names & vars(module).keys()):
            part = vars(module)[name]
            self.tell(part)
            if isinstance(part, types.ModuleType):
                self._module(part, names, (*above, module))

    def _named(self, name: str, value: Any, code: types.CodeType) -> None:
        """A value under the name by which the code of a function refers to it."""
        self.tell(value)
        if isinstance(value, types.ModuleType):
            self._module(value, _names(code))
        if isinstance(value, bool | int | float) and _lasts(value):
            self.options.setdefault(name, repr(value))

    def _code(self, code: types.CodeType) -> None:
        self._say("code", code.co_code.hex(), *code.co_names, *code.co_freevars)
        self._say(str(code.co_argcount), str(code.co_kwonlyargcount), str(code.co_flags))
        for constant in code.co_consts:
            self._constant(constant)

    def _constant(self, constant: Any) -> None:
        if isinstance(constant, types.CodeType):
            self._code(constant)
        elif isinstance(constant, tuple):
            for item in constant:
                self._constant(item)
        elif isinstance(constant, frozenset):
            self._say("set", *sorted(map(repr, constant)))
        else:
            self._say("constant", repr(constant))

    def _class(self, kind: type) -> None:
        self._say("class", kind.__module__, kind.__qualname__)
        if is_of_library(kind.__module__):
            return
        changing = _set_in_use(kind)
        for name, member in sorted(vars(kind).items()):
            function = isinstance(member, types.FunctionType)
            if function or not (name in changing or name.startswith("__")):
                self._say("member", name)
                self.tell(member)
        self._each("bases", kind.__bases__)

    def _object(self, value: Any, opened: bool) -> None:
        kind = type(value)
        self.tell(kind)
        # An attribute of the object itself: not of every object that answers to any name.
        inner = getattr(value, "__dict__", {}).get("__wrapped__")
        opened = opened or _measures(value)
        if inner is not None:
            self._say("wrapped")
            self.tell(inner, opened)
        if opened:
            for name, option in sorted(_options_of(value).items()):
                self._option(name, option, _is_ours(kind))

    def _option(self, name: str, option: Any, ours: bool) -> None:
        self._say("option", name)
        if ours and isinstance(option, np.ndarray):
            self._say("array", str(digest_of(option)))
        else:
            self.tell(option, opened=ours)
        if isinstance(option, _PLAIN) and _lasts(option) and option is not None:
            self.options.setdefault(name, repr(option))


def _place(item: Any) -> str:
    """Sorts the items of a set in the same way in every process."""
    told = behaviour(item)
    return "" if told is None else told.digest


def _measures(value: Any) -> bool:
    """Whether an object is a metric, by its methods."""
    kind = type(value)
    gives = any(callable(getattr(kind, name, None)) for name in ("result", "compute"))
    return gives and any(callable(getattr(kind, name, None)) for name in _TAKES)


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(_PACKAGES)


def _lasts(value: Any) -> bool:
    """Whether a plain value is likely to be the same in the next process if nobody changed it."""
    if isinstance(value, bool | enum.Enum | type(None) | type(...)):
        return True
    if isinstance(value, int | float):
        return not math.isfinite(value) or abs(value) < _LARGEST
    if isinstance(value, str):
        return len(value) <= _LONGEST and not ("/" in value or "\\" in value)
    return False


def _is_option(value: Any, ours: bool) -> bool:
    """Whether an attribute of an object is an option of it, by its kind."""
    plain = (*_PLAIN, enum.Enum, np.generic, tuple, frozenset)
    code = (type, functools.partial, types.FunctionType, types.MethodType)
    filled = (list, dict, np.ndarray)
    if isinstance(value, (*plain, *code, *(filled if ours else ()))):
        return True
    # Of an object of the user's, the code is told.
    return _measures(value) or not is_of_library(type(value).__module__)


def _options_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that only its constructor sets."""
    kind = type(value)
    library = is_of_library(kind.__module__)
    if library and callable(getattr(value, "get_config", None)):
        # Keras numbers its objects in their names.
        config: dict[str, Any] = _without_names(value.get_config())
        return config
    found = {
        name: getattr(value, name)
        for base in kind.__mro__
        for name in getattr(base, "__slots__", ())
        if hasattr(value, name)
    }
    found |= getattr(value, "__dict__", {})
    ours = _is_ours(kind)
    changing = _set_in_use(kind)
    return {
        name: option
        for name, option in found.items()
        if name not in changing
        and not name.startswith("__")
        and not (library and not ours and name.startswith("_"))
        # A method that was replaced in this object alone, such as by a test.
        and not callable(getattr(kind, name, None))
        and not isinstance(getattr(kind, name, None), functools.cached_property)
        and _is_option(option, ours)
    }


def _without_names(config: Any) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return config


def _contents(
    cells: Iterable[tuple[str, types.CellType]], changing: frozenset[str]
) -> Iterator[tuple[str, Any]]:
    """What variables of outer functions hold, but those that change and those not set yet."""
    for name, cell in cells:
        if name not in changing:
            try:
                yield name, cell.cell_contents
            except ValueError:
                continue


def _names(code: types.CodeType) -> set[str]:
    return {name for part in _parts(code) for name in part.co_names}


def _parts(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function and of all functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _parts(constant)


def _stored(code: types.CodeType, operation: str) -> frozenset[str]:
    """The names that a function, and the functions in it, use in one way."""
    return frozenset(
        str(instruction.argval)
        for part in _parts(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname == operation
    )


def _set_in_use(kind: type) -> frozenset[str]:
    """The attributes that methods of a class set after its objects were made."""
    found: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            for function in _functions(member):
                if name not in _MAKERS:
                    found |= _stored(function.__code__, "STORE_ATTR")
    return frozenset(found)


def _functions(member: Any) -> Iterator[types.FunctionType]:
    inner: Callable[..., Any] | None = member
    if isinstance(member, staticmethod | classmethod):
        inner = member.__func__
    if isinstance(member, property):
        for part in (member.fget, member.fset):
            yield from _functions(part)
    elif isinstance(inner, types.FunctionType):
        yield inner
        if hasattr(inner, "__wrapped__"):
            yield from _functions(inner.__wrapped__)
