"""Modules for export, and calls of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram


@dataclass(frozen=True)
class Call:
    """A module to export, and a call of it.

    Attributes:
        module: the module, or a program that is exported already.
        args: positional arguments.
        kwargs: keyword arguments.
        dynamic: sizes that stay open, as for `torch.export.export`.
        strict: whether TorchDynamo captures the module.
    """

    module: nn.Module | ExportedProgram
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    dynamic: Any = None
    strict: bool = False


#: Returns a module with a call.
Build = Callable[[], Call]


class Run(nn.Module):
    """A module of layers and a function that calls them."""

    def __init__(self, run: Any, **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            if isinstance(part, torch.Tensor):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the module."""
        return _plain(self.run(self, *args, **kwargs))


def _plain(outputs: Any) -> Any:
    """Return outputs with plain tuples, as PyTorch writes no others of its own to files."""
    if type(outputs) is list or type(outputs).__module__ == "torch.return_types":
        return tuple(map(_plain, outputs))
    return tuple(map(_plain, outputs)) if type(outputs) is tuple else outputs
