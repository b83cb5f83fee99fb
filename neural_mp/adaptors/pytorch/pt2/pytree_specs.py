"""Pytree specs of a program's inputs and outputs in a file; no class is looked up."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from neural_mp.io.limits import MAX_DEPTH
from neural_mp.io.readers import load_json
from neural_mp.util.validators import preview

#: Only supported version of the format.
_VERSION = 1
_NAMED_TUPLE = pytree.SUPPORTED_SERIALIZED_TYPES[namedtuple]
_DEFAULT_DICT = "collections.defaultdict"
_FACTORIES = frozenset({"list", "dict", "int", "float", "set", "str", "bool", "tuple"})


def checked_tree(text: object) -> str:
    """Return a pytree spec, rewritten; containers must be registered in this process.

    PyTorch may import modules named in a context, so only plain keys are allowed.

    Raises:
        ValueError: if the text is not such a spec.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected a pytree spec, got {preview(text)}")
    spec = load_json(text)
    match spec:
        case [int() as version, dict() as tree] if version == _VERSION:
            return json.dumps([_VERSION, _validate_spec(tree, 0)])
    raise ValueError(f"expected a pytree spec of inputs or outputs, got {preview(text)}")


def _validate_spec(tree: object, depth: int) -> dict[str, Any]:
    match tree:
        case {"type": None, "context": None, "children_spec": []}:
            return {"type": None, "context": None, "children_spec": []}
        case {"type": str() as kind, "context": context, "children_spec": list() as children}:
            if depth < MAX_DEPTH:
                below = [_validate_spec(child, depth + 1) for child in children]
                checked = _validate_context(kind, context)
                return {"type": kind, "context": checked, "children_spec": below}
    raise ValueError(f"expected a pytree spec of inputs or outputs, got {preview(tree)}")


def _validate_context(kind: str, context: object) -> Any:
    registered = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if kind not in registered:
        raise ValueError(
            f"the program takes or returns {preview(kind)}, a class that is not registered with "
            f"torch.utils._pytree; import its package"
        )
    reads = pytree.SUPPORTED_SERIALIZED_TYPES[registered[kind]].from_dumpable_context
    if reads is _NAMED_TUPLE.from_dumpable_context:
        if not isinstance(context, str) or context not in registered:
            raise ValueError(
                f"the program takes or returns {preview(context)}, which is not registered"
            )
        return context
    if kind == _DEFAULT_DICT:
        return _default_dict(context)
    if reads is not None:
        raise ValueError(f"the program takes or returns {kind!r}, a class with a reader of its own")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"expected keys, got {preview(context)}")
    return None if context is None else json.dumps(_validate_plain_keys(load_json(context)))


def _default_dict(context: Any) -> dict[str, Any]:
    match context:
        case {
            "default_factory_module": "builtins" as module,
            "default_factory_name": str() as name,
            "dict_context": keys,
        } if name in _FACTORIES and len(context) == 3:
            return {
                "default_factory_module": module,
                "default_factory_name": name,
                "dict_context": _validate_plain_keys(keys),
            }
    raise ValueError(f"expected the keys of a defaultdict, got {preview(context)}")


def _validate_plain_keys(value: object, depth: int = 0) -> Any:
    """Return a value of lists, strings and numbers: PyTorch treats some dicts as class names."""
    if isinstance(value, list) and depth < MAX_DEPTH:
        return [_validate_plain_keys(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"expected plain keys, got {preview(value)}")
