"""Functions that `torch.compile` leaves out, without an import of torch's compiler."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def uncompiled(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return the function excluded from tracing by `torch.compile`.

    `torch.compiler.disable` imports the compiler, which takes about a second.
    """
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call_uncompiled(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call_uncompiled
