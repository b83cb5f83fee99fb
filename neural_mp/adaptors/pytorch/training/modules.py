"""Single modules of a torch model in 16 bits or in float32, while it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

#: Modules whose own children never run: they hand the weights of these to one op.
_FUSED = (nn.MultiheadAttention, nn.RNNBase)


def unit_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that can be put into 16 bits by themselves: those without modules in them."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, name: str) -> None:
        if isinstance(module, _FUSED) or not any(True for _ in module.children()):
            found[name] = module
            return
        for part, child in module.named_children():
            visit(child, f"{name}.{part}" if name else part)

    visit(model, "")
    return found


class RunsIn:
    """Lets calls of a module run in 16 bits, or in float32, whatever is around it.

    A class, and no closure, so that the module can still be copied and pickled.

    Args:
        dtype: bfloat16, float16 or float32.
        cast_inputs: whether its inputs are cast to that; else autocast does it where it sees fit.
        cast_outputs: whether its outputs are cast to float32.
    """

    def __init__(
        self, dtype: torch.dtype, *, cast_inputs: bool = True, cast_outputs: bool = False
    ) -> None:
        self.dtype = dtype
        self.cast_inputs = cast_inputs
        self.cast_outputs = cast_outputs
        self._entered: list[Any] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_entered": []}

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Any, Any]:
        """Enter autocast, or leave it, and cast the inputs."""
        low = self.dtype is not torch.float32
        context = torch.autocast(device_of(module), self.dtype if low else None, enabled=low)
        context.__enter__()
        self._entered.append(context)
        if not self.cast_inputs:
            return args, kwargs
        return cast_floats((args, dict(kwargs)), self.dtype)

    def after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> Any:
        """Undo `before`, also where the module failed, and cast the outputs."""
        self._entered.pop().__exit__(None, None, None)
        return cast_floats(outputs, torch.float32) if self.cast_outputs else outputs

    def on(self, module: nn.Module) -> Callable[[], None]:
        """Begin with a module; what ends it is returned."""
        handles = (
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, with_kwargs=True, always_call=True),
        )

        def end() -> None:
            for handle in handles:
                handle.remove()

        return end


def device_of(module: nn.Module) -> str:
    """The type of device that the weights of a module are on; `cpu` where it has none."""
    tensor = next(module.parameters(), next(module.buffers(), torch.empty(0)))
    return tensor.device.type


def cast_floats(values: Any, dtype: torch.dtype) -> Any:
    """Nested values with tensors of 16 or 32 bit floats cast."""
    floats = (torch.float32, torch.bfloat16, torch.float16)

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in floats else leaf

    return pytree.tree_map(cast, values)
