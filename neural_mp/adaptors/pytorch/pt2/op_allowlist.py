"""Allowlist of ops that a program from a file may call, by name; paths are never followed.

`ops.txt` lists the ops of exported inference programs. Other ops, including those of later
versions, are refused: internals of PyTorch such as `max_pool2d_with_indices_backward` trust their
arguments, so that wrong ones read and write memory outside the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from neural_mp.adaptors.pytorch.graph import qdq_ops
from neural_mp.io.limits import is_trusted

_OP = re.compile(r"torch\.ops\.([a-z_]\w*)\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?", re.ASCII)
_TABLE = "ops.txt"
_HIGHER_ORDER = "higher_order"
#: Libraries of PyTorch itself, whose other ops are not meant for files.
_OWN = frozenset({"aten", "prims", "quantized", "onednn", "mkldnn", "c10d", "debugprims"})
#: Ops without tensors, which check numbers.
_OF_NUMBERS = frozenset(
    f"aten::{name}"
    for name in ("_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size")
)
_FUNCTIONS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "_operator": "add and_ eq floordiv ge getitem gt index le lshift lt mod mul ne neg not_ or_"
        " pos pow rshift sub truediv xor",
        "math": "acos asin asinh atan ceil cos floor log log2 sin sqrt tan tanh trunc",
        "torch": "sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt"
        " sym_sum _check _check_is_size _sym_acos _sym_asin _sym_asinh _sym_atan _sym_cos _sym_log"
        " _sym_log2 _sym_sin _sym_sqrt _sym_tan _sym_tanh",
        "torch._C": "_set_grad_enabled",
        "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
        "torch._functorch.predispatch": "_add_batch_dim _remove_batch_dim _vmap_decrement_nesting"
        " _vmap_increment_nesting lazy_load_decompositions",
    }.items()
    for name in names.split()
)


class ForbiddenOpError(ValueError):
    """Raised for an op that a program from a file may not call."""


@cache
def list_allowed_ops() -> Mapping[str, frozenset[str]]:
    """Return library → names of the ops that programs in files may call.

    Variants that write to their first input (`relu_`) are allowed with their op (`relu`).
    """
    allowed: dict[str, frozenset[str]] = {}
    text = resources.files(__package__).joinpath(_TABLE).read_text("ascii")
    for line in text.splitlines():
        library, colon, names = line.partition(":")
        if colon and not line.startswith("#"):
            allowed[library] = allowed.get(library, frozenset()).union(names.split())
    return {**allowed, qdq_ops.LIBRARY: _own_op_names()}


def _own_op_names() -> frozenset[str]:
    prefix = f"{qdq_ops.LIBRARY}::"
    names = torch._C._dispatch_get_all_op_names()
    return frozenset(
        n.removeprefix(prefix).partition(".")[0] for n in names if n.startswith(prefix)
    )


def check_call_target(target: str) -> str:
    """Return the name of an op or function that a program from a file may call.

    Raises:
        ForbiddenOpError: if the op is not allowed.
        ValueError: if the target is not an op, or does not exist.
    """
    if target in _FUNCTIONS:
        return target
    named = _OP.fullmatch(target)
    if named is None:
        raise ValueError(f"the program calls {target[:100]!r}, which is not an op")
    library, name, overload = named.groups()
    trusted = is_trusted(f"{library}.{name}")
    if not (trusted or is_allowed(library, name)):
        raise ForbiddenOpError(_explain_refusal(target, library, name))
    if library == _HIGHER_ORDER:
        exists = overload is None and isinstance(_find_op(library, name), HigherOrderOperator)
    else:
        op = _find_op(library, name, overload or "")
        exists = isinstance(op, OpOverload) and (trusted or _computes_tensors(op))
    if not exists:
        raise ValueError(
            f"the program calls the op {target!r}, which is not registered; import its package"
        )
    return target


def is_allowed(library: str, name: str) -> bool:
    """Whether programs in files may call an op, or its variant that writes to its first input."""
    names = list_allowed_ops().get(library, frozenset())
    return name in names or (name.endswith("_") and name.removesuffix("_") in names)


def _explain_refusal(target: str, library: str, name: str) -> str:
    if library in _OWN or library == _HIGHER_ORDER:
        why = "exported inference programs do not contain, and whose arguments may be unchecked"
    else:
        why = "is a custom op"
    return (
        f"the program calls the op {target!r}, which {why}. Export the model without this op; or, "
        f"if you trust the op in this file, import its package and allow it with --trust "
        f"{library}.{name} or trust=({f'{library}.{name}'!r},)"
    )


def _computes_tensors(op: OpOverload) -> bool:
    """Whether a variant of an op is one that exported programs contain.

    Others write to a tensor given for their output, or are functions of numbers for TorchScript,
    which do not check for a division by zero.
    """
    schema = op._schema
    if any(argument.is_out for argument in schema.arguments):
        return False
    if not torch._C._dispatch_has_kernel(op.name()):
        return False
    types = " ".join(str(value.type) for value in (*schema.arguments, *schema.returns))
    return "Tensor" in types or schema.name in _OF_NUMBERS


def _find_op(*names: str) -> Any:
    target: Any = torch.ops
    for name in names:
        target = getattr(target, name, None)
    return target
