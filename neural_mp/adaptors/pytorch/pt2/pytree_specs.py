"""How a program's inputs and outputs are nested, as its file holds it: no class is looked up."""

from __future__ import annotations

import json
from collections import namedtuple
from typing import Any

from torch.utils import _pytree as pytree

from neural_mp.io.limits import MAX_DEPTH
from neural_mp.io.readers import load_json
from neural_mp.util.validators import shown

#: The one version of the format.
_VERSION = 1
_NAMED_TUPLE = pytree.SUPPORTED_SERIALIZED_TYPES[namedtuple]
_DEFAULT_DICT = "collections.defaultdict"
_FACTORIES = frozenset({"list", "dict", "int", "float", "set", "str", "bool", "tuple"})


def checked_tree(text: object) -> str:
    """The text of a nesting, written anew: of containers that this process knows already.

    What PyTorch reads in a context may import modules by name, so only plain keys are let through.

    Raises:
        ValueError: it holds anything else.
    """
    if not isinstance(text, str):
        raise ValueError(f"{shown(text)} stands where a nesting is expected")
    found = load_json(text)
    match found:
        case [int() as version, dict() as tree] if version == _VERSION:
            return json.dumps([_VERSION, _checked(tree, 0)])
    raise ValueError(f"{shown(text)} is no nesting of inputs or outputs")


def _checked(tree: object, depth: int) -> dict[str, Any]:
    match tree:
        case {"type": None, "context": None, "children_spec": []}:
            return {"type": None, "context": None, "children_spec": []}
        case {"type": str() as kind, "context": context, "children_spec": list() as children}:
            if depth < MAX_DEPTH:
                below = [_checked(child, depth + 1) for child in children]
                found = _context(kind, context)
                return {"type": kind, "context": found, "children_spec": below}
    raise ValueError(f"{shown(tree)} is no nesting of inputs or outputs")


def _context(kind: str, context: object) -> Any:
    """What belongs to a container of a kind, such as the keys of a dict."""
    known = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if kind not in known:
        raise ValueError(
            f"it takes or returns {shown(kind)}, a class that is not registered with "
            f"torch.utils._pytree; import its package"
        )
    reads = pytree.SUPPORTED_SERIALIZED_TYPES[known[kind]].from_dumpable_context
    if reads is _NAMED_TUPLE.from_dumpable_context:
        if not isinstance(context, str) or context not in known:
            raise ValueError(f"it takes or returns {shown(context)}, which is not registered")
        return context
    if kind == _DEFAULT_DICT:
        return _default_dict(context)
    if reads is not None:
        raise ValueError(f"it takes or returns {kind!r}, a class that reads itself from files")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"{shown(context)} stands where keys are expected")
    return None if context is None else json.dumps(_plain(load_json(context)))


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
                "dict_context": _plain(keys),
            }
    raise ValueError(f"{shown(context)} stands where the keys of a defaultdict are expected")


def _plain(value: object, depth: int = 0) -> Any:
    """A value of lists, texts and numbers only: PyTorch takes some dicts for names of classes."""
    if isinstance(value, list) and depth < MAX_DEPTH:
        return [_plain(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{shown(value)} stands where plain keys are expected")
