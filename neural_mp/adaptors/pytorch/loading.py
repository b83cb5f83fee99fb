"""From what a user hands over to a captured, prepared model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch import capture, storage
from neural_mp.adaptors.pytorch.model import Call, TorchModel
from neural_mp.adaptors.pytorch.prepare import prepare
from neural_mp.errors import ConfigurationError, ModelLoadError


def load(source: Any, inputs: Any, example: Any) -> TorchModel:
    """Capture a module, or take in an exported program or its file.

    Args:
        source: `nn.Module`, `ExportedProgram` or a path.
        inputs: names of the parameters the data goes to, or example tensors.
        example: the inputs of one batch of the user's data, if there is any.
    """
    if isinstance(source, str | Path):
        source = _read(Path(source))
    names, tensors = _split(inputs)
    if isinstance(source, ExportedProgram):
        return _from_program(source)
    parameters = capture.parameters_of(source)
    unknown = [name for name in names if name not in parameters]
    if unknown:
        raise ConfigurationError(
            f"inputs names {unknown[0]!r}, which {type(source).__name__}.forward does not take; "
            f"it takes {', '.join(parameters)}"
        )
    given = tensors if tensors is not None else example
    warnings: list[str] = []
    if given is None:
        call = capture.guess_call(source)
        shape = list(call.args[0].shape)
        warnings.append(
            f"no data was given, so the model was captured with an inferred input of shape {shape}; "
            f"set inputs to an example tensor to be sure"
        )
    else:
        call = capture.as_call(given, names or parameters)
    program, found = capture.capture(source, call)
    return _assemble(program, call, parameters, source, (*warnings, *found))


def _assemble(
    program: ExportedProgram,
    call: Call,
    parameters: tuple[str, ...],
    original: nn.Module | None,
    warnings: tuple[str, ...],
) -> TorchModel:
    module = prepare(program.module(check_guards=False))
    return TorchModel(module, module, call, parameters, original, warnings)


def _from_program(program: ExportedProgram) -> TorchModel:
    program = capture.functional(program)
    call = storage.example_of(program)
    parameters = storage.parameters_of_graph(program.module(check_guards=False))
    return _assemble(program, call, parameters, None, ())


def _read(path: Path) -> ExportedProgram:
    if not path.exists():
        raise ModelLoadError(f"there is no model file {str(path)!r}")
    if path.suffix != ".pt2":
        raise ModelLoadError(
            f"{str(path)!r} is a pickle, and reading a pickle runs code from it; give the module "
            f"itself, or save it with torch.export.save(torch.export.export(…), 'model.pt2')"
        )
    return storage.load_program(path)


def _split(inputs: Any) -> tuple[tuple[str, ...], Any]:
    """Whether the user's `inputs` are parameter names or example tensors."""
    if inputs is None:
        return (), None
    if isinstance(inputs, str):
        return tuple(name.strip() for name in inputs.split(",") if name.strip()), None
    leaves = pytree.tree_leaves(inputs)
    if leaves and all(isinstance(leaf, str) for leaf in leaves):
        return tuple(leaves), None
    if leaves and all(isinstance(leaf, torch.Tensor) or hasattr(leaf, "__array__") for leaf in leaves):
        return (), inputs
    if not leaves:
        return (), None
    raise ConfigurationError(
        f"inputs must be parameter names or example tensors, got {type(inputs).__name__}"
    )
