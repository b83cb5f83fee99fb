"""Programs that PyTorch itself exports from ordinary modules, and their outputs by neural-mp."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from accepted.cases import Case, Cases, Result, outcomes
from accepted.export_calls import Build, Run
from accepted.export_flows import FLOWS, RANDOM, UNDECOMPOSED
from accepted.export_nets import NETS
from accepted.export_ops import OPS
from accepted.export_sequences import SEQUENCES
from accepted.export_transformers import TRANSFORMERS
from torch import nn
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

CASES = Cases()


def program_of(build: Build, *, decomposed: bool) -> ExportedProgram:
    """Return the exported program of a module."""
    torch.manual_seed(0)
    call = build()
    program = call.module
    if isinstance(program, nn.Module):
        # The arguments of `Run` are a tuple to PyTorch.
        packed = isinstance(program, Run) and call.dynamic is not None
        dynamic = (call.dynamic,) if packed else call.dynamic
        options = {"dynamic_shapes": dynamic, "strict": call.strict}
        program = torch.export.export(program.eval(), call.args, call.kwargs, **options)
    return program.run_decompositions() if decomposed else program


def _writer(build: Build, *, decomposed: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            torch.export.save(program_of(build, decomposed=decomposed), path)

    return write


for _name, _build in {**NETS, **SEQUENCES, **OPS, **FLOWS, **TRANSFORMERS}.items():
    CASES.add(f"{_name}.pt2", _writer(_build, decomposed=False), random=_name in RANDOM)
    if _name not in UNDECOMPOSED:
        CASES.add(f"{_name}_core.pt2", _writer(_build, decomposed=True), random=_name in RANDOM)


def _numbers(outputs: Any) -> list[Any]:
    """Return the tensors among the outputs as arrays."""
    tensors = (x for x in pytree.tree_leaves(outputs) if isinstance(x, torch.Tensor))
    plain = (x.float() if x.dtype == torch.bfloat16 else x for x in tensors)
    return [x.detach().resolve_conj().numpy() for x in plain]


def _expected(path: Path, _feeds: Any) -> tuple[Any, list[Any]]:
    program = torch.export.load(path)
    args, kwargs = program.example_inputs
    with torch.no_grad():
        return None, _numbers(program.module()(*args, **kwargs))


def _given(path: Path, _feeds: Any) -> list[Any]:
    from neural_mp.adaptors.registry import adaptor_for

    adaptor = adaptor_for(str(path))
    model = adaptor.load(str(path))
    with torch.no_grad():
        return _numbers(adaptor.native(model)(*model.example.args, **model.example.kwargs))


def results(cases: Iterable[Case], folder: Path) -> Iterator[Result]:
    """Yield the outcome of every case."""
    return outcomes(cases, folder, _expected, _given)
