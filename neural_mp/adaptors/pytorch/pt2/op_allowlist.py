"""Allowlist of ops that a program from a file may call, by name; paths are never followed."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

from neural_mp.adaptors.pytorch import qdq_ops

_OP = re.compile(r"torch\.ops\.([a-z_]+)\.([A-Za-z_]\w*)(?:\.([A-Za-z_]\w*))?", re.ASCII)
#: Libraries of ops that compute tensors from tensors.
_LIBRARIES = frozenset(
    {"aten", "prims", "quantized_decomposed", "torchao", "torchvision", qdq_ops.LIBRARY}
)
#: Exceptions in these libraries: ops that access files or memory without an owning tensor, e.g.
#: kernels that use memory offsets from a tensor without a bounds check.
_NOT_OPS = re.compile(
    r"(?!__i?(and|or|xor|lshift|rshift)__)__.*|from_file|save|set_?|_print|warn|_test_.*"
    r"|_sparse_.*_unsafe|_sparse_coo_tensor_with_dims_and_tensors|.*resize.*storage.*"
    r"|adaptive_max_pool\dd_backward|_?segment_reduce\w*"
)
_HIGHER_ORDER = re.compile(
    r"associative_scan|auto_functionalized(_v2)?|cond|flex_attention|hints_wrapper|invoke_subgraph"
    r"|map_impl|out_dtype|scan|strict_mode|tag_activation_checkpoint|while_loop"
    r"|wrap(_activation_checkpoint|_with_autocast|_with_set_grad_enabled)?"
)
_FUNCTIONS = frozenset(
    f"{module}.{name}"
    for module, names in {
        "_operator": "add and_ eq floordiv ge getitem gt index le lshift lt mod mul ne neg not_ or_"
        " pos pow rshift sub truediv xor",
        "math": "acos asin asinh atan ceil cos cosh exp floor log log2 sin sinh sqrt tan tanh"
        " trunc",
        "torch": "sym_float sym_fresh_size sym_int sym_ite sym_max sym_min sym_not sym_sqrt"
        " sym_sum _check _check_is_size _sym_acos _sym_asin _sym_asinh _sym_atan _sym_cos"
        " _sym_cosh _sym_exp _sym_log _sym_log2 _sym_sin _sym_sinh _sym_sqrt _sym_tan _sym_tanh",
        "torch._C": "_set_grad_enabled",
        "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
        "torch._functorch.predispatch": "_add_batch_dim _remove_batch_dim _vmap_decrement_nesting"
        " _vmap_increment_nesting lazy_load_decompositions",
    }.items()
    for name in names.split()
)


@cache
def checked_target(target: str) -> str:
    """Return the name of an op or function that a program from a file may call.

    Raises:
        ValueError: if the target is not allowed or does not exist.
    """
    if target in _FUNCTIONS:
        return target
    named = _OP.fullmatch(target)
    if named is None:
        raise ValueError(f"the program calls {target[:100]!r}, which is not an op")
    library, name, overload = named.groups()
    if library == "higher_order" and _HIGHER_ORDER.fullmatch(name) and overload is None:
        if isinstance(_found(library, name), HigherOrderOperator):
            return target
    elif library not in _LIBRARIES or _NOT_OPS.fullmatch(name):
        raise ValueError(
            f"the program calls the op {target!r}, which is not allowed in files; if you trust the "
            f"file, give the program of torch.export.load"
        )
    elif overload and isinstance(_found(library, name, overload), OpOverload):
        return target
    raise ValueError(
        f"the program calls the op {target!r}, which is not registered; import its package"
    )


def _found(*names: str) -> Any:
    found: Any = torch.ops
    for name in names:
        found = getattr(found, name, None)
    return found
