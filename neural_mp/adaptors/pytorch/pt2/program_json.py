"""Program JSON of `torch.export.save`: copied piece by piece, each validated.

The schema follows `torch._export.serde.schema`. Text that PyTorch evaluates, imports, looks up or
writes into code is either rewritten (expressions), on an allowlist (ops, pytree classes), or a
valid name. No class is looked up. Parts that a loaded model does not need (guards, source traces)
are dropped.
"""

from __future__ import annotations

import json
import keyword
import re
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.pt2.op_allowlist import check_call_target
from neural_mp.adaptors.pytorch.pt2.size_expressions import render_expression
from neural_mp.io.limits import (
    MAX_DEPTH,
    MAX_EXPRESSION_EXPONENT,
    MAX_PROGRAM_VALUES,
    MAX_TENSOR_AXES,
)
from neural_mp.io.readers import load_json
from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    boolean,
    invalid_value_error,
    is_integer,
    list_of,
    mapping_of,
    one_of,
    optional,
    preview_value,
    record,
    validate_at,
    values_matching,
)

#: Names become variables in code that torch.fx writes and runs.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names of parameters and modules are quoted in that code.
_PATH = re.compile(r"[\w .:@+=/-]*")
_LINE = re.compile(r"[^\x00-\x1f\x7f]*")
#: Names that generated code takes from its scope.
_TAKEN = frozenset({"self", "torch"})
#: Non-finite floats as strings, in files of torch ≥ 2.7.
_NO_NUMBERS = ("Infinity", "-Infinity", "NaN")


def _validate_text_like(expected: str, test: Callable[[str], Any]) -> Validator[str]:
    return values_matching(expected, lambda value: isinstance(value, str) and test(value))


def _is_variable(identifier: str) -> bool:
    return (
        bool(_NAME.fullmatch(identifier))
        and not keyword.iskeyword(identifier)
        and identifier not in _TAKEN
    )


def _is_path(dotted_path: str) -> bool:
    parts = dotted_path.split(".")
    return bool(_PATH.fullmatch(dotted_path)) and not any(
        part.startswith("__") and part.endswith("__") for part in parts if part
    )


def _is_int64(value: Any) -> bool:
    return is_integer(value) and abs(value) <= 2**64


int64: Validator[int] = values_matching("a whole number of 64 bits", _is_int64)
real: Validator[float | str] = values_matching(
    "a number",
    lambda value: isinstance(value, float) or value in _NO_NUMBERS or _is_int64(value),
    lambda value: float(value) if is_integer(value) else value,
)
#: Any text; only compared, or written as a literal.
text = _validate_text_like("a text", lambda _: True)
line = _validate_text_like("a line of text", _LINE.fullmatch)
name = _validate_text_like("a name", _is_variable)
#: May be a Python keyword, or empty.
argument_name = _validate_text_like(
    "the name of an argument", lambda word: not word or _NAME.fullmatch(word)
)
#: Any Unicode identifier.
parameter_name = _validate_text_like(
    "the name of a parameter", lambda word: word.isidentifier() and not keyword.iskeyword(word)
)
#: Dotted module path, or the path of a tensor in a module.
path = _validate_text_like("the name of a module", _is_path)
nothing: Validator[Any] = values_matching(
    "nothing, since no such part is loaded", lambda value: not value
)


def validate_one_key(validators: Mapping[str, Validator[Any]]) -> Validator[dict[str, Any]]:
    """Validate a dict with a single key, which selects the validator of its value."""

    def validate_item(value: object) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) != 1:
            raise invalid_value_error("a value with a single key for its kind", value)
        ((key, item),) = value.items()
        if key not in validators:
            raise InvalidValueError(f"values of the kind {preview_value(key)} are never loaded")
        return {key: validate_at(key, validators[key], item)}

    return validate_item


_DEVICES = ("cpu", "cuda", "hpu", "meta", "mps", "mtia", "xla", "xpu")
#: Op dialects of PyTorch.
_VERIFIERS = ("", "ATEN", "EDGE", "TRAINING")
#: Dialect of programs that do not name theirs.
_ANY = "TRAINING"


def check_program_text(content: bytes) -> bytes:
    """Return a program's text, rewritten from its known parts.

    Raises:
        ValueError, InvalidValueError: if an exported and saved program cannot hold a value.
    """
    program = _PROGRAM(load_json(content, MAX_PROGRAM_VALUES))
    # PyTorch checks a program's ops by its verifiers, and without any not at all.
    program["verifiers"] = program.get("verifiers") or [_ANY]
    return json.dumps(program).encode()


def check_payload_list(content: bytes) -> dict[str, dict[str, Any]]:
    """Return tensor name → location of its values, and metadata, from the archive's list.

    Raises:
        ValueError, InvalidValueError: if the list holds other content, e.g. a pickled object.
    """
    return _PAYLOADS(load_json(content))["config"]


def _check_range_key(value: object) -> str:
    render_expression(text(value))
    return str(value)  # compared as text, never evaluated


def _validate_target(value: object) -> str:
    return check_call_target(text(value))


def _validate_argument(value: object) -> Any:
    return _ARGUMENT(value)


def _validate_graph(value: object) -> Any:
    return _GRAPH(value)


#: Only supported version of pytree specs.
_VERSION = 1
_NAMED_TUPLE = pytree.SUPPORTED_SERIALIZED_TYPES[namedtuple]
_DEFAULT_DICT = "collections.defaultdict"
_FACTORIES = frozenset({"list", "dict", "int", "float", "set", "str", "bool", "tuple"})


def check_tree_spec(text: object) -> str:
    """Return a pytree spec, rewritten; containers must be registered in this process.

    PyTorch may import modules named in a context, so only plain keys are allowed.

    Raises:
        ValueError: if the text is not such a spec.
    """
    if not isinstance(text, str):
        raise ValueError(f"expected a pytree spec, got {preview_value(text)}")
    spec = load_json(text)
    match spec:
        case [int() as version, dict() as tree] if version == _VERSION:
            return json.dumps([_VERSION, _validate_spec(tree, 0)])
    raise ValueError(f"expected a pytree spec of inputs or outputs, got {preview_value(text)}")


def _validate_spec(tree: object, depth: int) -> dict[str, Any]:
    match tree:
        case {"type": None, "context": None, "children_spec": []}:
            return {"type": None, "context": None, "children_spec": []}
        case {"type": str() as kind, "context": context, "children_spec": list() as children}:
            if depth < MAX_DEPTH:
                below = [_validate_spec(child, depth + 1) for child in children]
                checked = _validate_context(kind, context)
                return {"type": kind, "context": checked, "children_spec": below}
    raise ValueError(f"expected a pytree spec of inputs or outputs, got {preview_value(tree)}")


def _validate_context(kind: str, context: object) -> Any:
    registered = pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if kind not in registered:
        raise ValueError(
            f"the program takes or returns {preview_value(kind)}, a class that is not registered "
            "with torch.utils._pytree; import its package"
        )
    reads = pytree.SUPPORTED_SERIALIZED_TYPES[registered[kind]].from_dumpable_context
    if reads is _NAMED_TUPLE.from_dumpable_context:
        if not isinstance(context, str) or context not in registered:
            raise ValueError(
                f"the program takes or returns {preview_value(context)}, which is not registered"
            )
        return context
    if kind == _DEFAULT_DICT:
        return _check_default_dict(context)
    if reads is not None:
        raise ValueError(f"the program takes or returns {kind!r}, a class with a reader of its own")
    if context is not None and not isinstance(context, str):
        raise ValueError(f"expected keys, got {preview_value(context)}")
    return None if context is None else json.dumps(_validate_plain_keys(load_json(context)))


def _check_default_dict(context: Any) -> dict[str, Any]:
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
    raise ValueError(f"expected the keys of a defaultdict, got {preview_value(context)}")


def _validate_plain_keys(value: object, depth: int = 0) -> Any:
    """Return a value of lists, strings and numbers: PyTorch treats some dicts as class names."""
    if isinstance(value, list) and depth < MAX_DEPTH:
        return [_validate_plain_keys(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"expected plain keys, got {preview_value(value)}")


_HINT = validate_one_key({"as_int": int64, "as_bool": boolean, "as_float": real})
_SYMBOLIC = record(
    {"expr_str": lambda value: render_expression(text(value))}, {"hint": optional(_HINT)}
)
_SIZE = validate_one_key({"as_expr": _SYMBOLIC, "as_int": int64})
_SIZES = list_of(_SIZE, f"a list of at most {MAX_TENSOR_AXES}", MAX_TENSOR_AXES)
_FRACTION = validate_one_key({"as_expr": _SYMBOLIC, "as_float": real})
_TRUTH = validate_one_key({"as_expr": _SYMBOLIC, "as_bool": boolean})
_DEVICE = record({"type": one_of(_DEVICES)}, {"index": optional(int64)})
_TENSOR_META = record(
    {
        "dtype": int64,
        "sizes": _SIZES,
        "requires_grad": boolean,
        "device": _DEVICE,
        "strides": _SIZES,
        "storage_offset": _SIZE,
        "layout": int64,
    }
)
_TENSOR = record({"name": name})
_NAMED_SIZE = validate_one_key({"as_name": name, "as_int": int64})
_NAMED_FRACTION = validate_one_key({"as_name": name, "as_float": real})
_NAMED_TRUTH = validate_one_key({"as_name": name, "as_bool": boolean})
_TENSOR_OR_NONE = validate_one_key({"as_tensor": _TENSOR, "as_none": boolean})
_CONSTANT = {
    "as_none": boolean,
    "as_int": int64,
    "as_float": real,
    "as_string": text,
    "as_bool": boolean,
}
_ARGUMENT = validate_one_key(
    {
        **_CONSTANT,
        "as_tensor": _TENSOR,
        "as_tensors": list_of(_TENSOR),
        "as_ints": list_of(int64),
        "as_floats": list_of(real),
        "as_strings": list_of(text),
        "as_sym_int": _NAMED_SIZE,
        "as_sym_ints": list_of(_NAMED_SIZE),
        "as_scalar_type": int64,
        "as_memory_format": int64,
        "as_layout": int64,
        "as_device": _DEVICE,
        "as_bools": list_of(boolean),
        "as_sym_bool": _NAMED_TRUTH,
        "as_sym_bools": list_of(_NAMED_TRUTH),
        "as_graph": record({"name": name, "graph": _validate_graph}),
        "as_optional_tensors": list_of(_TENSOR_OR_NONE),
        "as_operator": _validate_target,
        "as_sym_float": _NAMED_FRACTION,
        "as_sym_floats": list_of(_NAMED_FRACTION),
        "as_optional_tensor": _TENSOR_OR_NONE,
        "as_complex": record({"real": real, "imag": real}),
        "as_nested_tensors": list_of(list_of(_TENSOR)),
        "as_int_lists": list_of(list_of(int64)),
        "as_float_lists": list_of(list_of(real)),
        "as_string_to_argument": mapping_of(_validate_argument, text),
    }
)
_CALL = record(
    {
        "target": _validate_target,
        "inputs": list_of(
            record({"name": argument_name, "arg": _validate_argument}, {"kind": optional(int64)})
        ),
        "outputs": list_of(_ARGUMENT),
        # Of an op's origin, only the names of its modules are needed.
        "metadata": record({}, {"nn_module_stack": line}),
    },
    {"is_hop_single_tensor_return": optional(boolean), "name": optional(name)},
)


def _validate_node(value: object) -> dict[str, Any]:
    """Keep the results of powers and shifts small."""
    node: dict[str, Any] = _CALL(value)
    if node["target"] in _GROWING:
        last = node["inputs"][-1]["arg"] if node["inputs"] else {}
        exponent = last.get("as_int", last.get("as_float"))
        if exponent is None or not abs(exponent) <= MAX_EXPRESSION_EXPONENT:
            raise invalid_value_error(
                f"a constant exponent of at most {MAX_EXPRESSION_EXPONENT}", last
            )
    return node


#: Functions of sizes whose results grow with their second argument.
_GROWING = frozenset({"_operator.pow", "_operator.lshift", "_operator.rshift"})
_GRAPH = record(
    {
        "inputs": list_of(_ARGUMENT),
        "outputs": list_of(_ARGUMENT),
        "nodes": list_of(_validate_node),
        "tensor_values": mapping_of(_TENSOR_META, name),
        "sym_int_values": mapping_of(_SIZE, name),
        "sym_bool_values": mapping_of(_TRUTH, name),
    },
    {
        "is_single_tensor_return": boolean,
        "custom_obj_values": nothing,
        "sym_float_values": mapping_of(_FRACTION, name),
    },
)
_IN = validate_one_key(
    {
        "user_input": record({"arg": _ARGUMENT}),
        "parameter": record({"arg": _TENSOR, "parameter_name": path}),
        "buffer": record({"arg": _TENSOR, "buffer_name": path, "persistent": boolean}),
        "tensor_constant": record({"arg": _TENSOR, "tensor_constant_name": path}),
        "token": record({"arg": _TENSOR}),
        "constant_input": record({"name": name, "value": validate_one_key(_CONSTANT)}),
    }
)
_OUT = validate_one_key(
    {
        "user_output": record({"arg": _ARGUMENT}),
        "loss_output": record({"arg": _TENSOR}),
        "buffer_mutation": record({"arg": _TENSOR, "buffer_name": path}),
        "parameter_mutation": record({"arg": _TENSOR, "parameter_name": path}),
        "gradient_to_parameter": record({"arg": _TENSOR, "parameter_name": path}),
        "gradient_to_user_input": record({"arg": _TENSOR, "user_input_name": name}),
        "user_input_mutation": record({"arg": _TENSOR, "user_input_name": name}),
        "token": record({"arg": _TENSOR}),
    }
)
_CALLS = record(
    {
        "inputs": list_of(_ARGUMENT),
        "outputs": list_of(_ARGUMENT),
        "in_spec": check_tree_spec,
        "out_spec": check_tree_spec,
    },
    {"forward_arg_names": optional(list_of(parameter_name))},
)
_GRAPH_MODULE = record(
    {
        "graph": _GRAPH,
        "signature": record({"input_specs": list_of(_IN), "output_specs": list_of(_OUT)}),
        "module_call_graph": list_of(record({"fqn": path}, {"signature": optional(_CALLS)})),
    },
    {
        "treespec_namedtuple_fields": mapping_of(
            record({"field_names": list_of(parameter_name)}), line
        )
    },
)
_PROGRAM = record(
    {
        "graph_module": _GRAPH_MODULE,
        "opset_version": mapping_of(int64, name),
        "range_constraints": mapping_of(
            record({"min_val": optional(int64), "max_val": optional(int64)}), _check_range_key
        ),
        "schema_version": record({"major": int64, "minor": int64}),
    },
    {"verifiers": list_of(one_of(_VERIFIERS)), "torch_version": line},
)
_NOT_PICKLED = values_matching(
    "values that are not pickled, since reading those could run code", lambda value: value is False
)
_WHERE = record(
    {
        "path_name": name,
        "is_param": boolean,
        "use_pickle": _NOT_PICKLED,
        "tensor_meta": _TENSOR_META,
    }
)
_PAYLOADS = record({"config": mapping_of(_WHERE, path)})
