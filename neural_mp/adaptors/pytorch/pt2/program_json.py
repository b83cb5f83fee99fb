"""The JSON text of a program that `torch.export.save` wrote: copied part by part, each checked.

The forms follow `torch._export.serde.schema`. A text that PyTorch evaluates, imports, looks up or
writes into code is written anew (expressions), is on a list (ops, classes of nestings), or has the
form of a name. What a loaded model has no use for (guards, traces of the source) is left out.
"""

from __future__ import annotations

import json
from typing import Any

from neural_mp.adaptors.pytorch.pt2.json_validators import (
    argument_name,
    boolean,
    integer,
    keyed,
    line,
    listed,
    name,
    nothing,
    one_of,
    parameter_name,
    path,
    real,
    record,
    text,
)
from neural_mp.adaptors.pytorch.pt2.op_allowlist import checked_target
from neural_mp.adaptors.pytorch.pt2.pytree_specs import checked_tree
from neural_mp.adaptors.pytorch.pt2.size_expressions import rendered
from neural_mp.io.limits import MAX_PROGRAM_VALUES, MAX_TENSOR_AXES
from neural_mp.io.readers import load_json
from neural_mp.util.validators import optional, shown

_DEVICES = frozenset({"cpu", "cuda", "hpu", "meta", "mps", "mtia", "xla", "xpu"})
_VERIFIERS = frozenset({"", "ATEN", "EDGE", "TRAINING"})
#: The dialect of programs of versions that did not write it down.
_ANY = "TRAINING"


def checked_program(content: bytes) -> bytes:
    """The text of a program, written anew from what of it is known.

    Raises:
        ValueError: it holds what no program does that was exported and saved.
    """
    program = _PROGRAM(load_json(content, MAX_PROGRAM_VALUES))
    # PyTorch checks the ops of a program by these, and without any it checks none.
    program["verifiers"] = program.get("verifiers") or [_ANY]
    return json.dumps(program).encode()


def checked_payloads(content: bytes) -> dict[str, dict[str, Any]]:
    """Name of a tensor → where its values are, and its form, as the archive's own list says.

    Raises:
        ValueError: the list holds anything else, such as a pickled object.
    """
    found: dict[str, dict[str, Any]] = _PAYLOADS(load_json(content))["config"]
    return found


def _expression(value: object) -> str:
    return rendered(text(value))


def _range_key(value: object) -> str:
    rendered(text(value))
    return str(value)  # it is compared as it stands, and never evaluated


def _target(value: object) -> str:
    return checked_target(text(value))


def _device_type(value: object) -> str:
    if value not in _DEVICES:
        raise ValueError(f"{shown(value)} stands where a device is expected")
    return str(value)


def _verifiers(value: object) -> list[str]:
    """Dialects of ops that PyTorch knows."""
    if not isinstance(value, list) or not all(word in _VERIFIERS for word in value):
        raise ValueError(f"{shown(value)} stands where dialects of ops are expected")
    return value


def _not_pickled(value: object) -> bool:
    if value is not False:
        raise ValueError("it holds pickled objects; reading them could run code")
    return False


def _argument(value: object) -> Any:
    return _ARGUMENT(value)


def _graph(value: object) -> Any:
    return _GRAPH(value)


_HINT = one_of({"as_int": integer, "as_bool": boolean, "as_float": real})
_SYMBOLIC = record({"expr_str": _expression}, {"hint": optional(_HINT)})
_SIZE = one_of({"as_expr": _SYMBOLIC, "as_int": integer})
_SIZES = listed(_SIZE, MAX_TENSOR_AXES)
_FRACTION = one_of({"as_expr": _SYMBOLIC, "as_float": real})
_TRUTH = one_of({"as_expr": _SYMBOLIC, "as_bool": boolean})
_DEVICE = record({"type": _device_type}, {"index": optional(integer)})
_TENSOR_META = record(
    {
        "dtype": integer,
        "sizes": _SIZES,
        "requires_grad": boolean,
        "device": _DEVICE,
        "strides": _SIZES,
        "storage_offset": _SIZE,
        "layout": integer,
    }
)
_TENSOR = record({"name": name})
_NAMED_SIZE = one_of({"as_name": name, "as_int": integer})
_NAMED_FRACTION = one_of({"as_name": name, "as_float": real})
_NAMED_TRUTH = one_of({"as_name": name, "as_bool": boolean})
_TENSOR_OR_NONE = one_of({"as_tensor": _TENSOR, "as_none": boolean})
_CONSTANT = {
    "as_none": boolean,
    "as_int": integer,
    "as_float": real,
    "as_string": text,
    "as_bool": boolean,
}
_ARGUMENT = one_of(
    {
        **_CONSTANT,
        "as_tensor": _TENSOR,
        "as_tensors": listed(_TENSOR),
        "as_ints": listed(integer),
        "as_floats": listed(real),
        "as_strings": listed(text),
        "as_sym_int": _NAMED_SIZE,
        "as_sym_ints": listed(_NAMED_SIZE),
        "as_scalar_type": integer,
        "as_memory_format": integer,
        "as_layout": integer,
        "as_device": _DEVICE,
        "as_bools": listed(boolean),
        "as_sym_bool": _NAMED_TRUTH,
        "as_sym_bools": listed(_NAMED_TRUTH),
        "as_graph": record({"name": name, "graph": _graph}),
        "as_optional_tensors": listed(_TENSOR_OR_NONE),
        "as_operator": _target,
        "as_sym_float": _NAMED_FRACTION,
        "as_sym_floats": listed(_NAMED_FRACTION),
        "as_optional_tensor": _TENSOR_OR_NONE,
        "as_complex": record({"real": real, "imag": real}),
        "as_nested_tensors": listed(listed(_TENSOR)),
        "as_int_lists": listed(listed(integer)),
        "as_float_lists": listed(listed(real)),
        "as_string_to_argument": keyed(text, _argument),
    }
)
_NODE = record(
    {
        "target": _target,
        "inputs": listed(
            record({"name": argument_name, "arg": _argument}, {"kind": optional(integer)})
        ),
        "outputs": listed(_ARGUMENT),
        # Of all that is known of where an op comes from, the names of its modules are of use.
        "metadata": record({}, {"nn_module_stack": line}),
    },
    {"is_hop_single_tensor_return": optional(boolean), "name": optional(name)},
)
_GRAPH = record(
    {
        "inputs": listed(_ARGUMENT),
        "outputs": listed(_ARGUMENT),
        "nodes": listed(_NODE),
        "tensor_values": keyed(name, _TENSOR_META),
        "sym_int_values": keyed(name, _SIZE),
        "sym_bool_values": keyed(name, _TRUTH),
    },
    {
        "is_single_tensor_return": boolean,
        "custom_obj_values": nothing,
        "sym_float_values": keyed(name, _FRACTION),
    },
)
_IN = one_of(
    {
        "user_input": record({"arg": _ARGUMENT}),
        "parameter": record({"arg": _TENSOR, "parameter_name": path}),
        "buffer": record({"arg": _TENSOR, "buffer_name": path, "persistent": boolean}),
        "tensor_constant": record({"arg": _TENSOR, "tensor_constant_name": path}),
        "token": record({"arg": _TENSOR}),
        "constant_input": record({"name": name, "value": one_of(_CONSTANT)}),
    }
)
_OUT = one_of(
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
        "inputs": listed(_ARGUMENT),
        "outputs": listed(_ARGUMENT),
        "in_spec": checked_tree,
        "out_spec": checked_tree,
    },
    {"forward_arg_names": optional(listed(parameter_name))},
)
_GRAPH_MODULE = record(
    {
        "graph": _GRAPH,
        "signature": record({"input_specs": listed(_IN), "output_specs": listed(_OUT)}),
        "module_call_graph": listed(record({"fqn": path}, {"signature": optional(_CALLS)})),
    },
    {"treespec_namedtuple_fields": keyed(line, record({"field_names": listed(parameter_name)}))},
)
_PROGRAM = record(
    {
        "graph_module": _GRAPH_MODULE,
        "opset_version": keyed(name, integer),
        "range_constraints": keyed(
            _range_key,
            record({"min_val": optional(integer), "max_val": optional(integer)}),
        ),
        "schema_version": record({"major": integer, "minor": integer}),
    },
    {"verifiers": _verifiers, "torch_version": line},
)
_WHERE = record(
    {
        "path_name": name,
        "is_param": boolean,
        "use_pickle": _not_pickled,
        "tensor_meta": _TENSOR_META,
    }
)
_PAYLOADS = record({"config": keyed(path, _WHERE)})
