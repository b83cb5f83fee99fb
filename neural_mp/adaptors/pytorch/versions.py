"""What differs between the versions of PyTorch that we run on, asked of the one installed."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

onednn = torch.ops.onednn


def integer_convolution(axes: int) -> Any:
    """The integer kernel of convolutions along 1, 2 or 3 axes.

    Before torch 2.7 there was one for every number of axes, all called alike.
    """
    if hasattr(onednn, "qconv_pointwise"):
        return onednn.qconv_pointwise.default
    return getattr(onednn, f"qconv{axes}d_pointwise").default


#: All integer kernels of convolutions.
INTEGER_CONVOLUTIONS = frozenset(map(integer_convolution, (1, 2, 3)))


@cache
def convolution_takes_activations(axes: int) -> bool:
    """Whether the integer kernel of convolutions along so many axes runs a ReLU behind it.

    It is tried once: torch 2.6 refuses it for one axis.
    """
    one, steps = torch.ones([1] * (axes + 2), dtype=torch.uint8), torch.ones(1)
    geometry = ([1] * axes, [0] * axes, [1] * axes, 1)
    try:
        packed = onednn.qconv_prepack(one.to(torch.int8), steps, 1.0, 0, *geometry, list(one.shape))
        before = (one, 1.0, 0, packed, steps, torch.zeros(1, dtype=torch.long), None)
        integer_convolution(axes)(*before, *geometry, 1.0, 0, torch.float32, "relu", [], "")
    except RuntimeError:
        return False
    return True


_CHECKS_GUARDS = "check_guards" in inspect.signature(ExportedProgram.module).parameters


def unguarded_module(program: ExportedProgram) -> GraphModule:
    """A program as a module that does not check by itself what the export took for granted.

    Before torch 2.9 it never did.
    """
    return program.module(check_guards=False) if _CHECKS_GUARDS else program.module()


def is_being_traced() -> bool:
    """Whether code runs to be compiled or exported, so that sizes may stand for others.

    Before torch 2.7 an export counted as compiling.
    """
    exporting = getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)
    return bool(torch.compiler.is_compiling() or exporting())


def _has_autocast(device: str) -> bool:
    try:
        torch.is_autocast_enabled(device)
    except RuntimeError:
        return False
    return True


_MAY_HAVE_AUTOCAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia", "xla", "privateuseone")
#: Where torch's own autocast may be on; torch 2.6 does not know it of `mtia`.
AUTOCAST_DEVICES = tuple(filter(_has_autocast, _MAY_HAVE_AUTOCAST))
