"""Models in parts: the graphs of single modules, and the user's own code that calls them.

A model whose graph can be captured has one part, the whole. One that cannot, say because it
branches on a tensor's value, is taken apart into the largest modules that can; its own code, the
shell, goes on calling what then stands in their place.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Interpreter
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch import capture
from neural_mp.adaptors.pytorch.calls import Call
from neural_mp.adaptors.pytorch.model import TorchModel
from neural_mp.errors import CaptureError, NeuralMPError

logger = logging.getLogger(__name__)

#: Modules worth a part: those with something to convert.
_LAYERS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Linear,
    nn.Embedding,
    nn.RNNBase,
    nn.MultiheadAttention,
)


def assembled(shell: nn.Module | None, parts: Mapping[str, nn.Module]) -> nn.Module:
    """The user's code with these modules in place of its own; weights of the rest are shared.

    Args:
        shell: the user's module; None where the only part is the whole.
        parts: path of a module → what is called instead.
    """
    if shell is None:
        (whole,) = parts.values()
        return whole
    # What stands in the memo is not copied but taken from there.
    memo: dict[int, Any] = {id(value): value for value in (*shell.parameters(), *shell.buffers())}
    memo.update({id(shell.get_submodule(path)): part for path, part in parts.items()})
    return copy.deepcopy(shell, memo)


class _Interpreted(nn.Module):
    """A graph that is called like the module it came from and run by an interpreter."""

    def __init__(self, interpreter: Interpreter) -> None:
        super().__init__()
        self.interpreter = interpreter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        flat = self.interpreter.run(*Call(args, kwargs).leaves(), enable_io_processing=False)
        return self.interpreter.module.graph.process_outputs(flat)


def interpreted(
    model: TorchModel, interpreters: Mapping[str, Interpreter]
) -> Callable[[Call], Any]:
    """A model as a function of its call, every part run by its interpreter."""
    parts = {path: _Interpreted(interpreter) for path, interpreter in interpreters.items()}
    module = assembled(model.shell, parts)

    def run(call: Call) -> Any:
        with torch.no_grad():
            return module(*call.args, **call.kwargs)

    return run


@dataclass
class _Seen:
    """How a module was called while its model ran once."""

    call: Call
    alike: bool = True


def capture_modules(module: nn.Module, call: Call) -> dict[str, tuple[ExportedProgram, Call]]:
    """The largest modules of a model whose graphs can be captured, by path.

    Raises:
        CaptureError: there is none.
    """
    with capture.inference_mode(module):
        seen = _watch(module, call)
        found: dict[str, tuple[ExportedProgram, Call]] = {}
        _descend(module, "", seen, found, set())
    if not found:
        raise CaptureError(
            f"no module of {type(module).__name__} that holds layers can be captured by itself"
        )
    return found


def _watch(module: nn.Module, call: Call) -> dict[nn.Module, _Seen]:
    seen: dict[nn.Module, _Seen] = {}

    def note(part: nn.Module, args: Any, kwargs: Any) -> None:
        given = Call(args, kwargs)
        if part not in seen:
            seen[part] = _Seen(given.map(_copied))
        elif _form(given) != _form(seen[part].call):
            seen[part].alike = False

    hooks = [
        part.register_forward_pre_hook(note, with_kwargs=True)
        for part in module.modules()
        if part is not module
    ]
    try:
        capture.run_once(module, call)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _form(call: Call) -> Any:
    """What must not change from call to call of one graph: all but the sizes of tensors."""
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    kinds = [(x.dtype, x.ndim) if isinstance(x, torch.Tensor) else x for x in leaves]
    return kinds, structure


def _descend(
    module: nn.Module,
    path: str,
    seen: Mapping[nn.Module, _Seen],
    found: dict[str, tuple[ExportedProgram, Call]],
    known: set[nn.Module],
) -> None:
    for name, child in module.named_children():
        if child in known or not any(isinstance(part, _LAYERS) for part in child.modules()):
            continue
        known.add(child)
        place = f"{path}.{name}" if path else name
        captured = _capture_alone(child, seen.get(child))
        if captured is None:
            _descend(child, place, seen, found, known)
        else:
            found[place] = captured


def _capture_alone(child: nn.Module, seen: _Seen | None) -> tuple[ExportedProgram, Call] | None:
    if isinstance(child, nn.ModuleList | nn.ModuleDict) or (seen is not None and not seen.alike):
        return None
    try:
        call = capture.guess_call(child) if seen is None else seen.call
        return capture.capture(child, call), call
    except NeuralMPError:
        logger.debug("%s cannot be captured by itself", type(child).__name__, exc_info=True)
        return None
