"""Differences between PyTorch versions, and functions that `torch.compile` leaves out."""

from __future__ import annotations

import inspect
import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch.fx.config
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._pytree import TreeSpec

onednn = torch.ops.onednn

#: Sources of generated graphs that stay for tracebacks, in the process.
MAX_GENERATED_SOURCE_BYTES = 1 << 19


def find_integer_convolution(axes: int) -> Any:
    """Return the integer kernel of convolutions along 1, 2 or 3 axes.

    Before torch 2.7, each number of axes had a kernel of its own with the same signature.
    """
    if hasattr(onednn, "qconv_pointwise"):
        return onednn.qconv_pointwise.default
    return getattr(onednn, f"qconv{axes}d_pointwise").default


#: All integer convolution kernels.
INTEGER_CONVOLUTIONS = frozenset(map(find_integer_convolution, (1, 2, 3)))


@cache
def convolution_takes_activations(axes: int) -> bool:
    """Whether the integer convolution kernel for `axes` axes can fuse ReLU.

    Tried once and cached: torch 2.6 does not support one axis.
    """
    tensor, steps = torch.ones([1] * (axes + 2), dtype=torch.uint8), torch.ones(1)
    geometry = ([1] * axes, [0] * axes, [1] * axes, 1)
    try:
        packed = onednn.qconv_prepack(
            tensor.to(torch.int8), steps, 1.0, 0, *geometry, list(tensor.shape)
        )
        operands = (tensor, 1.0, 0, packed, steps, torch.zeros(1, dtype=torch.long), None)
        find_integer_convolution(axes)(*operands, *geometry, 1.0, 0, torch.float32, "relu", [], "")
    except RuntimeError:
        return False
    return True


def has_exact_byte_products() -> bool:
    """Whether this CPU adds up products of bytes without saturation (AVX-512 VNNI).

    Before torch 2.10, there was no list of capabilities.
    """
    if hasattr(torch.cpu, "get_capabilities"):
        return bool(torch.cpu.get_capabilities().get("avx512_vnni", False))
    return bool(torch.cpu._is_vnni_supported())


def list_child_specs(spec: TreeSpec) -> list[TreeSpec]:
    """Return the specs of the children of a structure, an attribute before torch 2.9."""
    return list(spec.children() if hasattr(spec, "children") else spec.children_specs)


_CHECKS_GUARDS = "check_guards" in inspect.signature(ExportedProgram.module).parameters


def make_unguarded_module(program: ExportedProgram) -> GraphModule:
    """Convert a program to a module without checks of export assumptions.

    Before torch 2.9, there were no such checks.
    """
    return program.module(check_guards=False) if _CHECKS_GUARDS else program.module()


def with_code(module: nn.Module) -> nn.Module:
    """Return the module after generating the code of a graph whose code is generated on demand.

    Without the code, `forward` has no parameters.
    """
    _LazyGraphModule.force_recompile(module)
    return module


@contextmanager
def _replace_attribute_within(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute within the context, if the installed version has it."""
    previous = getattr(owner, name, None)
    if previous is None:
        yield
        return
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous)


def without_stack_traces() -> AbstractContextManager[None]:
    """Capture graphs without a stack trace for every op, which takes a tenth of the time or more.

    Before torch 2.13, there was no such option.
    """
    return _replace_attribute_within(torch.fx.config, "do_not_emit_stack_traces", True)


def allow_tensor_attributes() -> AbstractContextManager[None]:
    """Allow a module to assign tensors to its attributes during export.

    torch.export refuses such a module, as it leaves traced tensors there, and replaces lists and
    dicts; the caller restores the attributes.
    """
    from torch.export import _trace  # imports torch's compiler

    return _replace_attribute_within(_trace, "_detect_attribute_assignment", nullcontext)


def release_trace(program: ExportedProgram) -> None:
    """Let the memory of a trace with symbolic sizes go with its program.

    Torch (as of 2.13) keeps the example inputs and a cache of ops in cycles through C++, which no
    garbage collector sees, sizes in caches of the process, and the code of every graph.
    """
    from torch._guards import detect_fake_mode
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = detect_fake_mode([node.meta.get("val") for node in program.graph.nodes])
    sizes = getattr(mode, "shape_env", None)
    for name in ("tracked_fakes", "fake_tensor_cache"):
        if cached := getattr(sizes, name, None):
            cached.clear()
    FakeTensorMode.cache_clear()
    for method in vars(ShapeEnv).values():
        if hasattr(method, "cache_clear"):
            method.cache_clear()
    _forget_old_sources()


def _forget_old_sources() -> None:
    """Drop the oldest generated sources, which torch keeps for tracebacks, beyond the limit."""
    sources = getattr(getattr(torch.fx.graph_module, "_loader", None), "eval_cache", {})
    total_bytes = 0
    for name in reversed(list(sources)):
        total_bytes += len(sources.get(name, ""))
        if total_bytes > MAX_GENERATED_SOURCE_BYTES:
            sources.pop(name, None)
            linecache.cache.pop(name, None)


def is_being_traced() -> bool:
    """Whether code is being compiled or exported, so that sizes may be symbolic.

    Before torch 2.7, an export counted as compiling.
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
#: Devices that torch's autocast may be on for; torch 2.6 does not support `mtia`.
AUTOCAST_DEVICES = tuple(filter(_has_autocast, _MAY_HAVE_AUTOCAST))


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def disable_compilation(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Return the function excluded from tracing by `torch.compile`.

    `torch.compiler.disable` imports the compiler, which takes about a second.
    """
    disabled = torch._disable_dynamo(function)

    @wraps(function)
    def call_uncompiled(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        return (disabled if "torch._dynamo" in sys.modules else function)(*args, **kwargs)

    return call_uncompiled
