"""Fingerprints of objects and code, equal across processes for equal content.

Code is inspected statically, never run.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import logging
import math
import pickle
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

logger = logging.getLogger(__name__)

#: Version stored with fingerprints; to be raised when their computation changes.
FINGERPRINT_VERSION = 2
#: Class attributes added by Python, and documentation.
_NOT_CONTENT = frozenset(
    f"__{name}__"
    for name in (
        "dict",
        "weakref",
        "doc",
        "module",
        "qualname",
        "annotations",
        "annotate_func",
        "annotations_cache",
        "firstlineno",
        "slotnames",
        "static_attributes",
    )
)
_SLOT_TYPES = (types.MemberDescriptorType, types.GetSetDescriptorType)
#: Maximum objects hashed, of code and of state (cheaper per object).
_MAX_OBJECTS, _MAX_STATE_OBJECTS = 5_000, 1_000_000


@dataclass(frozen=True)
class CodeFingerprint:
    """Identity of code.

    Attributes:
        digest: equal for equal code, under one version of Python.
        options: name → constructor argument as text.
    """

    digest: str
    options: Mapping[str, str] = field(default_factory=dict)


def object_fingerprint(value: object) -> str | None:
    """Hash an object: its code, and its state with all referenced objects.

    Returns:
        64 hexadecimal digits; None if any part cannot be hashed, e.g. an open file.
    """
    hasher = _hash_value(value, include_state=True)
    return None if hasher is None else hasher.digest.hexdigest()


def code_fingerprint(value: object) -> CodeFingerprint | None:
    """Hash the code and constructor options of a metric, a function or a list of these.

    Of user-defined functions and classes, the bytecode is hashed with constants, defaults, and the
    functions, classes and scalars referenced; of an object, its class and the scalars set by the
    constructor only. Library code is hashed by name. Arrays, files, models, paths, and lists and
    dicts that may grow are ignored.

    Returns:
        None if any part cannot be hashed.
    """
    hasher = _hash_value(value, include_state=False)
    return None if hasher is None else CodeFingerprint(hasher.digest.hexdigest(), hasher.options)


def _hash_value(value: object, include_state: bool) -> _ObjectHasher | None:
    hasher = _ObjectHasher(include_state)
    try:
        hasher.hash_object(value, opened=True)
    except Exception:
        # User-defined objects may raise anything on access.
        logger.debug("%r cannot be fingerprinted", type(value), exc_info=True)
        return None
    return hasher


class _ObjectHasher:
    """Hashes objects, and the objects they refer to, into a digest.

    Without state, the content of referenced lists, dicts and objects is ignored, since running code
    changes the content; of `opened` objects, options are still hashed.
    """

    def __init__(self, include_state: bool) -> None:
        self.digest = hashlib.sha256()
        self.options: dict[str, str] = {}
        self._include_state = include_state
        self._left = _MAX_STATE_OBJECTS if include_state else _MAX_OBJECTS
        #: id → order and object, kept alive because ids of freed objects are reused.
        self._seen: dict[int, tuple[int, Any]] = {}

    def hash_object(self, value: object, opened: bool = False) -> None:
        """Hash a value.

        Raises:
            Exception: a part cannot be hashed.
        """
        opened = opened or self._include_state
        if isinstance(value, np.generic):
            self._hash_text_tokens("numpy", value.dtype.str)
            value = value.item()
        if isinstance(value, enum.Enum):
            self._hash_text_tokens("enum", type(value).__qualname__, str(value.name))
            self.hash_object(value.value)
        elif isinstance(value, SCALAR_TYPES):
            counts = self._include_state or is_stable(value)
            self._hash_text_tokens(type(value).__name__, repr(value) if counts else "")
        elif id(value) in self._seen:
            self._hash_text_tokens("again", str(self._seen[id(value)][0]))
        else:
            self._left -= 1
            if self._left < 0:
                raise ValueError("the number of referenced objects exceeds the limit")
            # The compiler decides whether equal tuples are one object.
            if not isinstance(value, tuple | frozenset):
                self._seen[id(value)] = len(self._seen), value
            self._hash_new_value(value, opened)

    def _hash_text_tokens(self, *tokens: str) -> None:
        for token in tokens:
            self.digest.update(f"{len(token)}:{token};".encode("utf-8", "surrogatepass"))

    def _hash_sequence_items(self, kind: str, values: Iterable[Any], opened: bool = False) -> None:
        items = list(values)
        self._hash_text_tokens(kind, str(len(items)))
        for value in items:
            self.hash_object(value, opened)

    def _hash_mapping_items(self, items: Mapping[Any, Any], opened: bool = False) -> None:
        self._hash_text_tokens("mapping", str(len(items)))
        for key, value in items.items():
            if isinstance(key, str):
                self._hash_text_tokens("key", key)
            else:
                self.hash_object(key, opened)
            self.hash_object(value, opened)

    def _feed_set_items(self, values: Iterable[Any], opened: bool) -> None:
        """Hash the items of a set in an order equal in every process."""
        outer, digests = (self.digest, self._seen), []
        for value in values:
            self.digest, self._seen = hashlib.sha256(), {}
            self.hash_object(value, opened)
            digests.append(self.digest.hexdigest())
        self.digest, self._seen = outer
        self._hash_text_tokens("set", *sorted(digests))

    def _hash_new_value(self, value: object, opened: bool) -> None:
        match value:
            case tuple():
                self._hash_sequence_items("tuple", value, opened)
            case frozenset():
                self._feed_set_items(value, opened)
            case list() if opened:
                self._hash_sequence_items("list", value, opened)
            case dict() | types.MappingProxyType() if opened:
                self._hash_mapping_items(value, opened)
            case set() if opened:
                self._feed_set_items(value, opened)
            case types.FunctionType():
                self._hash_function_code(value)
            case types.CodeType():
                self._hash_code_object(value)
            case type():
                self._hash_class_body(value)
            case types.MethodType():
                self._hash_text_tokens("method")
                self.hash_object(value.__func__)
                self.hash_object(value.__self__, opened)
            case functools.partial():
                self._hash_text_tokens("partial")
                self.hash_object(value.func, opened)
                self.hash_object(value.args)
                self._hash_mapping_items(value.keywords)
            case staticmethod() | classmethod():
                self._hash_sequence_items(type(value).__name__, (value.__func__,))
            case property():
                self._hash_sequence_items("property", (value.fget, value.fset, value.fdel))
            case functools.cached_property():
                self._hash_sequence_items("cached_property", (value.func,))
            case types.BuiltinFunctionType():
                self._hash_text_tokens("builtin", value.__qualname__)
                self.hash_object(value.__self__)
            case types.ModuleType():
                self._hash_module_name(value)
            case np.ndarray() if opened:
                self._hash_data_value(value)
            case _ if self._include_state and hasattr(value, "__array__"):
                self._hash_data_value(value)
            case _:
                self._hash_object_state(value, opened)

    def _hash_data_value(self, value: object) -> None:
        digest = compute_data_digest(value)
        if digest is None:
            raise ValueError(f"data of {type(value)} cannot be read")
        self._hash_text_tokens("data", digest)

    def _hash_library_version(self, module: str, name: str) -> None:
        top = sys.modules.get(module.partition(".")[0])
        version = getattr(top, "__version__", "") if self._include_state else ""
        self._hash_text_tokens("library", module, name, str(version))

    def _hash_module_name(self, module: types.ModuleType) -> None:
        if is_library_module(module.__name__):
            self._hash_library_version(module.__name__, "")
            return
        self._hash_text_tokens("module", module.__name__)
        if self._include_state:
            source = Path(module.__file__ or "").read_bytes()
            self._hash_text_tokens(hashlib.sha256(source).hexdigest())

    def _hash_function_code(self, function: types.FunctionType) -> None:
        if is_library_module(function.__module__) and "<locals>" not in function.__qualname__:
            self._hash_library_version(function.__module__, function.__qualname__)
            return
        code = function.__code__
        self._hash_text_tokens("function", function.__qualname__)
        self._hash_code_object(code)
        self.hash_object(function.__defaults__)
        self._hash_mapping_items(function.__kwdefaults__ or {})
        loaded = list_used_names(code, "LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
        referred = {name: function.__globals__[name] for name in loaded & {*function.__globals__}}
        referred |= _list_closure_variables(function)
        changing = list_used_names(code, "STORE_GLOBAL", "STORE_DEREF")
        for name in sorted(referred.keys() - (set() if self._include_state else changing)):
            value = referred[name]
            self._hash_text_tokens("refers to", name)
            self.hash_object(value)
            if isinstance(value, types.ModuleType):
                codes = _walk_code_objects(code)  # of inner functions, too
                self._feed_module_members(value, {n for part in codes for n in part.co_names})
            elif isinstance(value, bool | int | float) and is_stable(value):
                self.options.setdefault(name, repr(value))

    def _feed_module_members(
        self, module: types.ModuleType, names: set[str], above: tuple[types.ModuleType, ...] = ()
    ) -> None:
        """Hash members of a user module, and of its submodules, that a function may use."""
        if is_library_module(module.__name__) or module in above:
            return
        for name in sorted(names & vars(module).keys()):
            part = vars(module)[name]
            self.hash_object(part)
            if isinstance(part, types.ModuleType):
                self._feed_module_members(part, names, (*above, module))

    def _hash_code_object(self, code: types.CodeType) -> None:
        self._hash_text_tokens("code", code.co_code.hex(), *code.co_names, *code.co_freevars)
        self._hash_text_tokens(
            str(code.co_argcount), str(code.co_kwonlyargcount), str(code.co_flags)
        )
        # Constants in code are hashed even if such values are ignored elsewhere.
        include_state, self._include_state = self._include_state, True
        self._hash_sequence_items("constants", code.co_consts)
        self._include_state = include_state

    def _hash_class_body(self, kind: type) -> None:
        if is_library_module(kind.__module__):
            self._hash_library_version(kind.__module__, kind.__qualname__)
            return
        self._hash_text_tokens("class", kind.__module__, kind.__qualname__)
        changing = set() if self._include_state else find_mutated_attributes(kind)
        for name, member in sorted(vars(kind).items()):
            left_out = name in _NOT_CONTENT or name.startswith("_abc_")
            if left_out or isinstance(member, _SLOT_TYPES):
                continue
            if name not in changing or isinstance(member, types.FunctionType):
                self._hash_text_tokens("member", name)
                self.hash_object(member)
        self._hash_sequence_items("bases", kind.__bases__)

    def _hash_object_state(self, value: object, opened: bool) -> None:
        self.hash_object(type(value))
        # From `__dict__`, since some objects return a value for any attribute.
        inner = getattr(value, "__dict__", {}).get("__wrapped__")
        opened = opened or is_metric(value)
        if inner is not None:
            self._hash_text_tokens("wrapped")
            self.hash_object(inner, opened)
        if self._include_state:
            self._feed_copied_state(value)
        elif opened:
            own = is_own_metric(value)
            for name, option in list_constructor_options(value).items():
                self._hash_text_tokens("option", name)
                self.hash_object(option, opened=own)
                if option is not None and isinstance(option, SCALAR_TYPES) and is_stable(option):
                    self.options.setdefault(name, repr(option))

    def _feed_copied_state(self, value: Any) -> None:
        kind = type(value)
        if is_library_module(kind.__module__) and callable(getattr(value, "get_config", None)):
            # Keras adds a timestamp to copies.
            self.hash_object(value.get_config())
            return
        parts: Any = value.__reduce_ex__(pickle.DEFAULT_PROTOCOL)
        if isinstance(parts, str):
            self._hash_text_tokens("global", kind.__module__, parts)
            return
        listed = [list(part) if isinstance(part, Iterator) else part for part in parts]
        self._hash_sequence_items("object", listed)


def _list_closure_variables(function: types.FunctionType) -> dict[str, Any]:
    """Return variables of outer functions, except unset ones."""
    variables = {}
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        try:
            variables[name] = cell.cell_contents
        except ValueError:
            continue
    return variables


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


def is_stable(value: object) -> bool:
    """Whether a scalar probably is equal in the next process if the user changes nothing."""
    if isinstance(value, bool | enum.Enum | type(None) | type(...)):
        return True
    if isinstance(value, int | float):
        return not math.isfinite(value) or abs(value) < _MAX_OPTION_VALUE
    if isinstance(value, str):
        return len(value) <= _MAX_OPTION_CHARS and not ("/" in value or "\\" in value)
    return False


def is_metric(value: object) -> bool:
    """Whether an object is a metric, judged by its methods."""

    def has_any(*names: str) -> bool:
        return any(callable(getattr(type(value), name, None)) for name in names)

    return has_any("result", "compute") and has_any(*_UPDATE_METHODS)


def is_own_metric(value: object) -> bool:
    """Whether an object's package uses lists and dicts as options."""
    return type(value).__module__.startswith(_METRIC_PACKAGES)


def list_constructor_options(value: Any) -> dict[str, Any]:
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
    mutated = find_mutated_attributes(kind)
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


def _without_names(config: object) -> Any:
    if isinstance(config, dict):
        return {key: _without_names(value) for key, value in config.items() if key != "name"}
    return config


def list_used_names(code: types.CodeType, *operations: str) -> set[str]:
    """Return names used by the given bytecode operations, including inner functions."""
    return {
        str(instruction.argval)
        for part in _walk_code_objects(code)
        for instruction in dis.get_instructions(part)
        if instruction.opname in operations
    }


def _walk_code_objects(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _walk_code_objects(constant)


def find_mutated_attributes(kind: type) -> set[str]:
    """Return the attributes that methods set after construction."""
    return {
        attribute
        for base in kind.__mro__
        for name, member in vars(base).items()
        if name not in _CONSTRUCTOR_METHODS
        for function in _list_member_functions(member)
        for attribute in list_used_names(function.__code__, "STORE_ATTR")
    }


def _list_member_functions(member: object) -> Iterator[types.FunctionType]:
    if isinstance(member, staticmethod | classmethod):
        member = member.__func__
    if isinstance(member, property):
        yield from _list_member_functions(member.fget)
        yield from _list_member_functions(member.fset)
    elif isinstance(member, types.FunctionType):
        yield member
        yield from _list_member_functions(getattr(member, "__wrapped__", None))


T = TypeVar("T")

#: Distinguishes equal data split into different batch sizes.
_END_OF_BATCH = "end of batch"


class DataDigest:
    """Incremental digest of data.

    Attributes:
        complete: whether all data could be read as numbers, strings or bytes; only then do equal
            digests mean equal data.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.complete = True

    def hexdigest(self) -> str:
        """Return the current digest as 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def hash_values(self, value: object) -> None:
        """Hash arrays, tensors, numbers, strings, and mappings and sequences of these."""
        if isinstance(value, Mapping):
            for key in value:
                self._digest.update(str(key).encode())
                self.hash_values(value[key])
        elif isinstance(value, tuple | list):
            for item in value:
                self.hash_values(item)
        else:
            try:
                self._hash_array_values(np.asarray(value))
            except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PickleError):
                self._digest.update(repr(type(value)).encode())
                self.complete = False

    def _hash_array_values(self, array: np.ndarray[Any, Any]) -> None:
        self._digest.update(f"{array.dtype}{array.shape}".encode())
        if array.dtype == object:
            self._digest.update(pickle.dumps(array.tolist()))
        else:
            self._digest.update(array.tobytes())


class DigestingIterator:
    """Computes the digest of data that are iterated for another purpose."""

    def __init__(self) -> None:
        self._running = DataDigest()
        self._ended = False

    def wrap_batches(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches unchanged and hash them, starting over."""
        self._running, self._ended = DataDigest(), False
        for batch in batches:
            self._running.hash_values(batch)
            self._running.hash_values(_END_OF_BATCH)
            yield batch
        self._ended = True

    def __reduce__(self) -> tuple[type[DigestingIterator], tuple[()]]:
        return DigestingIterator, ()  # copies start empty

    @property
    def data_digest(self) -> str | None:
        """The digest of all batches; None if not read to the end, or not all hashable."""
        return self._running.hexdigest() if self._ended and self._running.complete else None


def compute_data_digest(value: object) -> str | None:
    """Return the digest of data; None if any part is neither numbers, strings nor bytes."""
    digest = DataDigest()
    digest.hash_values(value)
    return digest.hexdigest() if digest.complete else None
