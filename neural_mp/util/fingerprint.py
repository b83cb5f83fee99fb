"""A digest of what Python objects are and do: equal in another process for what is equal."""

from __future__ import annotations

import enum
import functools
import hashlib
import logging
import pickle
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Tells batches apart that hold the same values in batches of other sizes.
_END_OF_BATCH = "end of batch"


class DataDigest:
    """A digest of data that grows with every value.

    Attributes:
        complete: whether all that it was fed could be read as numbers, words or bytes; only then
            are two data with the same digest the same.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.complete = True

    def hexdigest(self) -> str:
        """The digest so far, as 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def feed(self, value: Any) -> None:
        """Take in arrays, tensors, numbers, words, and mappings and sequences of these."""
        if isinstance(value, Mapping):
            for key in value:
                self._digest.update(str(key).encode())
                self.feed(value[key])
        elif isinstance(value, tuple | list):
            for item in value:
                self.feed(item)
        else:
            try:
                self._feed_array(np.asarray(value))
            except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PickleError):
                self._digest.update(repr(type(value)).encode())
                self.complete = False

    def _feed_array(self, array: np.ndarray[Any, Any]) -> None:
        self._digest.update(f"{array.dtype}{array.shape}".encode())
        if array.dtype == object:
            self._digest.update(pickle.dumps(array.tolist()))
        else:
            self._digest.update(array.tobytes())


class Witness:
    """Watches data that are read for another purpose, and tells their digest afterwards."""

    def __init__(self) -> None:
        self._running = DataDigest()
        self._ended = False

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; what was watched before counts no more."""
        self._running, self._ended = DataDigest(), False
        for batch in batches:
            self._running.feed(batch)
            self._running.feed(_END_OF_BATCH)
            yield batch
        self._ended = True

    def __reduce__(self) -> tuple[type[Witness], tuple[()]]:
        return Witness, ()  # a copy begins anew

    @property
    def digest(self) -> str | None:
        """The digest of all batches; None where they were not read to their end, or not told."""
        return self._running.hexdigest() if self._ended and self._running.complete else None


def digest_of(value: Any) -> str | None:
    """The digest of data; None where something in it is neither numbers, words nor bytes."""
    found = DataDigest()
    found.feed(value)
    return found.hexdigest() if found.complete else None


logger = logging.getLogger(__name__)

#: What Python adds to every class by itself, and what people write for people.
_NOT_CONTENT = frozenset(
    ("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__qualname__")
)
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
_OWN = Path(__file__).parent.parent


def identity(value: Any) -> str | None:
    """A digest of what an object of the user's is and does.

    Of a function that is its bytecode, its constants, its defaults, and what it refers to; of an
    object its class, with the bytecode of its methods, and what it holds. What comes with a library
    counts by its name and the library's version.

    Returns:
        64 hexadecimal digits; None where the object holds something of which it cannot be told.
    """
    telling = _Identity()
    try:
        return telling.digest.hexdigest() if telling.tell(value) else None
    except RecursionError:  # such as a list whose every item holds the next one
        return None


class _Identity:
    """Feeds an object, and all that belongs to it, into a digest."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an id is that of another object once its owner is gone

    def tell(self, value: Any) -> bool:
        """Take an object in; whether it could be told what it is."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes | Path):
            return self._say("value", repr(value))
        if value is Ellipsis:
            return self._say("value", str(value))
        if isinstance(value, enum.Enum):
            return self._say("enum", str(value)) and self.tell(value.value)
        if id(value) in self._seen:
            return self._say("again", str(self._seen[id(value)]))
        self._seen[id(value)] = len(self._seen)
        self._alive.append(value)
        for kind, told in self._KINDS:
            if isinstance(value, kind):
                return told(self, value)
        if hasattr(value, "__array__"):
            return self._data(value)
        return self._object(value)

    def _say(self, *words: str) -> bool:
        for word in words:
            self.digest.update(f"{len(word)}:{word};".encode("utf-8", "surrogatepass"))
        return True

    def _each(self, kind: str, values: Iterable[Any]) -> bool:
        told = list(values)
        return self._say(kind, str(len(told))) and all(self.tell(value) for value in told)

    def _items(self, kind: str, items: Mapping[Any, Any]) -> bool:
        return self._each(kind, (part for item in items.items() for part in item))

    def _set(self, value: frozenset[Any]) -> bool:
        found = [identity(item) for item in value]
        return None not in found and self._say("set", *sorted(map(str, found)))

    def _data(self, value: Any) -> bool:
        found = digest_of(value)
        return found is not None and self._say("data", found)

    def _module(self, module: types.ModuleType) -> bool:
        if is_of_library(module.__name__):
            return self._of_library(module.__name__, "")
        try:
            source = Path(module.__file__ or "").read_bytes()
        except OSError:
            return False
        return self._say("module", module.__name__, hashlib.sha256(source).hexdigest())

    def _of_library(self, module: str, name: str) -> bool:
        top = module.partition(".")[0]
        version = getattr(sys.modules.get(top), "__version__", "")
        return self._say("library", module, name, str(version))

    def _builtin(self, function: types.BuiltinFunctionType) -> bool:
        owner = function.__self__
        named = self._say("builtin", function.__qualname__)
        return named and (isinstance(owner, types.ModuleType) or self.tell(owner))

    def _function(self, function: types.FunctionType) -> bool:
        if is_of_library(function.__module__) and "<locals>" not in function.__qualname__:
            return self._of_library(function.__module__, function.__qualname__)
        names = sorted(_names(function.__code__) & function.__globals__.keys())
        return (
            self._say("function", function.__qualname__)
            and self.tell(function.__code__)
            and self.tell(function.__defaults__)
            and self.tell(function.__kwdefaults__)
            and self._each("closure", map(_contents, function.__closure__ or ()))
            and self._items("globals", {name: function.__globals__[name] for name in names})
        )

    def _code(self, code: types.CodeType) -> bool:
        return (
            self._say("code", code.co_code.hex(), *code.co_names, *code.co_freevars)
            and self._say(str(code.co_argcount), str(code.co_kwonlyargcount), str(code.co_flags))
            and self._each("constants", code.co_consts)
        )

    def _class(self, kind: type) -> bool:
        if is_of_library(kind.__module__):
            return self._of_library(kind.__module__, kind.__qualname__)
        own = {
            name: value
            for name, value in sorted(vars(kind).items())
            if name not in _NOT_CONTENT
            and not name.startswith("_abc_")
            # The descriptors of slots have no content of their own.
            and not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)
        }
        return (
            self._say("class", kind.__module__, kind.__qualname__)
            and self._each("bases", kind.__bases__)
            and self._items("members", own)
        )

    def _object(self, value: Any) -> bool:
        """What an object shows of itself as it is copied: its class and what it holds."""
        kind = type(value)
        if is_of_library(kind.__module__) and callable(getattr(value, "get_config", None)):
            # Keras writes the time into copies.
            return self._each("config", [kind, value.get_config()])
        try:
            parts = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        except Exception:
            # Whatever an object raises that does not want to be copied.
            logger.debug("%s cannot be told", kind, exc_info=True)
            return False
        if isinstance(parts, str):
            return self._say("global", kind.__module__, parts)
        made, given, state, *items = (*parts, *[None] * 3)[:5]
        listed = [None if part is None else list(part) for part in items]
        return self._each("object", [kind, made, given, state, *listed])

    _KINDS: tuple[tuple[type | tuple[type, ...], Callable[[_Identity, Any], bool]], ...] = (
        ((tuple, list), lambda self, value: self._each(type(value).__name__, value)),
        ((dict, types.MappingProxyType), lambda self, value: self._items("mapping", value)),
        ((set, frozenset), _set),
        ((np.ndarray, np.generic), _data),
        (types.FunctionType, _function),
        (types.CodeType, _code),
        (
            types.MethodType,
            lambda self, value: self._each("method", (value.__func__, value.__self__)),
        ),
        (types.BuiltinFunctionType, _builtin),
        (
            functools.partial,
            lambda self, value: self._each("partial", (value.func, value.args, value.keywords)),
        ),
        (
            (staticmethod, classmethod),
            lambda self, value: self._each(type(value).__name__, (value.__func__,)),
        ),
        (
            property,
            lambda self, value: self._each("property", (value.fget, value.fset, value.fdel)),
        ),
        (types.ModuleType, _module),
        (type, _class),
    )


def _contents(cell: types.CellType) -> tuple[Any, ...]:
    """What a variable of an outer function holds; nothing where it was not set yet."""
    try:
        return (cell.cell_contents,)
    except ValueError:
        return ()


def _names(code: types.CodeType) -> set[str]:
    """The names that a function and the functions in it look up."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def is_of_library(module: str | None) -> bool:
    """Whether a module came with Python, with a package that is installed, or with this one."""
    found = None if module is None else sys.modules.get(module)
    if found is None or module == "__main__":
        return False
    file = getattr(found, "__file__", None)
    if file is None:  # built in, or a package of several folders
        return module in sys.builtin_module_names
    path = Path(file)
    return any(path.is_relative_to(folder) for folder in (*_LIBRARIES, _OWN))
