"""Classes of inputs and outputs, registered with torch, and plain classes instead in files.

Dataclasses of the user, and caches among the outputs of `transformers` models, are registered with
torch. A file that names a class of another package requires the class to be imported, and a file
must never cause imports. Saved models therefore take and return plain dicts, and restored models
return `NamedOutputs`.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.graph.graph_edit import copy_graph_shallowly
from neural_mp.adaptors.pytorch.versions import list_child_specs
from neural_mp.util.pytree import NamedOutputs

#: Package whose objects are taken apart; other objects are values as a whole.
_PACKAGE = "transformers"
_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
#: Classes registered with torch.
_registered: set[type] = set()


@dataclass(frozen=True)
class _Value:
    """Place of a tensor or a symbolic number, which torch passes on."""

    index: int


@dataclass(frozen=True)
class _Holder:
    """An object, dict, list or tuple, with its attributes or items."""

    kind: type
    names: tuple[object, ...]
    items: tuple[object, ...]


def register_dataclasses(values: object) -> None:
    """Register the classes of dataclass instances among values with torch, as containers."""
    for leaf in pytree.tree_leaves(values):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            if type(leaf) not in pytree.SUPPORTED_NODES:
                pytree.register_dataclass(type(leaf))
            fields = dataclasses.fields(leaf)
            register_dataclasses([getattr(leaf, field.name) for field in fields])


def register_caches(outputs: object) -> None:
    """Register the classes of caches among outputs as containers of their tensors.

    A graph returns tensors only; `DynamicCache` and others are then assembled from them. Classes
    that other code has registered keep their registration.
    """
    for leaf in pytree.tree_leaves(outputs):
        kind = type(leaf)
        if is_cache(leaf) and kind not in pytree.SUPPORTED_NODES:
            _registered.add(kind)
            pytree.register_pytree_node(
                kind,
                _flatten_cache,
                lambda values, context: _assemble_value(context[1], list(values)),
                serialized_type_name=f"{kind.__module__}.{kind.__qualname__}",
                flatten_with_keys_fn=_flattened_with_keys,
            )


def is_cache(value: object) -> bool:
    """Whether a value is an object of `transformers` that holds tensors."""
    values: list[object] = []
    if _can_decompose(value):
        _decompose_value(value, "", [], values)
    return bool(values)


def _can_decompose(value: object) -> bool:
    return type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(value, "__dict__")


def _flatten_cache(cache: object) -> tuple[list[object], list[Any]]:
    """Return the tensors of a cache, and their names with the form of the rest."""
    names: list[str] = []
    values: list[object] = []
    form = _decompose_value(cache, "", names, values)
    return values, [names, form]


def _flattened_with_keys(cache: object) -> tuple[list[tuple[pytree.KeyEntry, object]], list[Any]]:
    values, context = _flatten_cache(cache)
    return list(zip(map(pytree.MappingKey, context[0]), values, strict=True)), context


def _decompose_value(value: object, path: str, names: list[str], values: list[object]) -> object:
    """Return the form of a value, after appending its tensors and their names."""
    if isinstance(value, _VALUES):
        names.append(path)
        values.append(value)
        return _Value(len(values) - 1)
    keys: tuple[object, ...]
    items: tuple[object, ...]
    if isinstance(value, dict):
        keys, items = tuple(value), tuple(value.values())
    elif isinstance(value, list | tuple) and type(value) in (list, tuple):
        keys, items = tuple(range(len(value))), tuple(value)
    elif _can_decompose(value):
        keys, items = tuple(vars(value)), tuple(vars(value).values())
    else:
        return value
    paths = (f"{path}.{key}" if path else str(key) for key in keys)
    parts = (
        _decompose_value(item, deeper, names, values)
        for item, deeper in zip(items, paths, strict=True)
    )
    return _Holder(type(value), keys, tuple(parts))


def _assemble_value(form: object, values: list[object]) -> object:
    if isinstance(form, _Value):
        return values[form.index]
    if not isinstance(form, _Holder):
        return form
    items = [_assemble_value(item, values) for item in form.items]
    if form.kind in (list, tuple):
        return tuple(items) if form.kind is tuple else items
    content: dict[Any, object] = dict(zip(form.names, items, strict=True))
    if issubclass(form.kind, dict):
        return form.kind(content)
    instance: object = form.kind.__new__(form.kind)
    vars(instance).update(content)
    return instance


#: Containers of the standard library, available in every process.
_PLAIN = (dict, OrderedDict)


def _make_output_context(outputs: NamedOutputs) -> list[list[str]]:
    return [list(outputs), list(outputs.absent)]


def _rebuild_outputs(values: Iterable[object], context: list[list[str]]) -> NamedOutputs:
    outputs = NamedOutputs(zip(context[0], values, strict=True))
    if context[1]:
        outputs.absent = tuple(context[1])
    return outputs


pytree.register_pytree_node(
    NamedOutputs,
    lambda outputs: (list(outputs.values()), _make_output_context(outputs)),
    _rebuild_outputs,
    serialized_type_name="neural_mp.NamedOutputs",
    flatten_with_keys_fn=lambda outputs: (
        [(pytree.MappingKey(name), value) for name, value in outputs.items()],
        _make_output_context(outputs),
    ),
)

# torch registers the results of topk, sort, max etc. without a serialized name.
for _kind in torch.return_types.all_return_types:
    _name = f"torch.return_types.{_kind.__name__}"
    pytree.SUPPORTED_SERIALIZED_TYPES[_kind] = pytree._SerializeNodeDef(_kind, _name, None, None)
    pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[_name] = _kind


def with_plain_containers(module: GraphModule) -> tuple[GraphModule, bool]:
    """Return the graph with dicts for foreign classes, and whether its outputs changed."""
    info = module.graph._codegen.pytree_info
    inputs, outputs = (_make_plain_spec(spec) for spec in (info.in_spec, info.out_spec))
    return _with_specs(module, inputs, outputs), outputs != info.out_spec


def make_values_plain(values: Any) -> Any:
    """Return values with dicts for instances of foreign classes, as graphs in files take them."""
    leaves, spec = pytree.tree_flatten(values)
    return pytree.tree_unflatten(leaves, _make_plain_spec(spec))


def holds_foreign_containers(values: object) -> bool:
    """Whether values lie in containers whose class is not of the standard library."""
    spec = pytree.tree_structure(values)
    return _make_plain_spec(spec) != spec


def _make_plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    return _replace_in_spec(spec, _is_foreign_container, dict)


def with_named_outputs(module: GraphModule, absent: Sequence[str] = ()) -> GraphModule:
    """Return the graph with `NamedOutputs` for output dicts.

    Args:
        module: the graph.
        absent: names of outputs that are not returned, from `list_absent_fields`.
    """
    info = module.graph._codegen.pytree_info
    outputs = _replace_in_spec(info.out_spec, lambda spec: spec.type is dict, NamedOutputs)
    if absent and outputs.type is NamedOutputs:
        outputs.context[1].extend(absent)
    return _with_specs(module, info.in_spec, outputs)


def list_absent_fields(module: GraphModule) -> list[str]:
    """Return the names of fields of the output's class that are None, as in `transformers`."""
    spec = module.graph._codegen.pytree_info.out_spec
    if spec is None or not dataclasses.is_dataclass(spec.type):
        return []
    present = value_names(spec) or []
    return [field.name for field in dataclasses.fields(spec.type) if field.name not in present]


def _is_foreign_container(spec: pytree.TreeSpec) -> bool:
    """Whether a container with named values is not a standard-library type."""
    kind = spec.type
    if kind is namedtuple or kind in _registered:
        return True
    if not isinstance(kind, type) or kind in _PLAIN:
        return False
    named = issubclass(kind, Mapping) or dataclasses.is_dataclass(kind)
    return named and value_names(spec) is not None


def value_names(spec: pytree.TreeSpec) -> list[str] | None:
    """Return the names of a container's values, in order; None without names."""
    context = spec.context
    if spec.type is namedtuple:
        context = list(context._fields)
    # A dataclass registered with torch also keeps the names of its fields that are None.
    if isinstance(context, list) and len(context) == 2 and isinstance(context[0], list):
        context = context[0]
    listed = list(context) if isinstance(context, list | tuple) else []
    right = len(listed) == len(list_child_specs(spec)) and all(
        isinstance(name, str) for name in listed
    )
    return listed if right else None


def _with_specs(
    module: GraphModule, inputs: pytree.TreeSpec, outputs: pytree.TreeSpec
) -> GraphModule:
    info = module.graph._codegen.pytree_info
    if (inputs, outputs) == (info.in_spec, info.out_spec):
        return module
    rewritten = copy_graph_shallowly(module)
    codegen = copy.copy(rewritten.graph._codegen)
    codegen.pytree_info = info._replace(in_spec=inputs, out_spec=outputs)
    rewritten.graph.set_codegen(codegen)
    rewritten.recompile()
    return rewritten


def _replace_in_spec(
    spec: pytree.TreeSpec, chosen: Callable[[pytree.TreeSpec], bool], kind: type
) -> pytree.TreeSpec:
    if spec.is_leaf():
        return spec
    parts = [_replace_in_spec(child, chosen, kind) for child in list_child_specs(spec)]
    if chosen(spec):
        context = [value_names(spec), []] if kind is NamedOutputs else value_names(spec)
        return pytree.TreeSpec(kind, context, parts)
    return pytree.TreeSpec(spec.type, spec.context, parts)
