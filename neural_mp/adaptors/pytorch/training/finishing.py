"""The converted model with the trained numbers of its simulation."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.common.weights.code_packing import BitOrder, packed
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.casts import narrowed
from neural_mp.adaptors.pytorch.graph.model import Part, TorchModel
from neural_mp.adaptors.pytorch.kernels.lowering import runnable_form
from neural_mp.adaptors.pytorch.training.scales import Scales
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.adaptors.pytorch.training.simulation import Key, SimulatedPart, Source
from neural_mp.adaptors.pytorch.training.weight_rows import StoredRows


def finished(module: SimulatedModule) -> TorchModel:
    """Return the converted model with the weights and scales of a simulation."""
    source: Source = module.source
    parts = {}
    with torch.no_grad():
        for path, part in source.converted.parts.items():
            trained = module.part(path)
            parts[path] = _write_part(part, source.parts[path], trained)
    return replace(source.converted, parts=parts)


def _write_part(part: Part, names: SimulatedPart, trained: nn.Module) -> Part:
    """Return a part of the converted model with the numbers of its trained simulation."""
    portable = fx.shallow_copy(part.portable)
    table = getattr(trained, names.scales) if names.scales else Scales([], [], False)
    for key, parameter in names.weights.items():
        stored = table.stored(names.numbers[key])
        _store_weight(portable, key, stored, getattr(trained, parameter).detach())
    for key, name in names.norms.items():
        weight, bias = getattr(trained, name).folded()
        _store_weight(portable, key[:-1], table.stored(names.numbers[key[:-1]]), weight)
        _store_constant(portable, key[-1], bias)
    for name, parameter in names.floats.items():
        original, value = fx.attribute(portable, name), getattr(trained, parameter).detach()
        _store_constant(portable, name, narrowed(value, original.dtype).clone())
    encodings = table.encodings()
    for node in list(portable.graph.nodes):
        if node.op == "call_function" and node.name in names.quantizers:
            encoding = encodings[names.quantizers[node.name]]
            node.args = (node.args[0], encoding.scale, encoding.zero_point)
            for pair in list(node.users):
                pair.args = (node, encoding.scale, encoding.zero_point, *pair.args[3:])
    portable = fx.finish(portable)
    return Part(portable, runnable_form(portable), part.example, True)


def _store_weight(
    portable: GraphModule, key: Key, stored: StoredRows, weight: torch.Tensor
) -> None:
    integers = stored.integers(weight)
    if stored.form.has_offsets:
        codes = (integers - stored.form.limits[0]).to(torch.uint8).numpy()
        integers = torch.from_numpy(packed(codes, stored.form.bits, BitOrder.UPPER_FIRST).copy())
    else:
        integers = integers.to(torch.int8)
    values = integers, stored.scales, stored.offsets
    for name, value in zip(key, values, strict=False):
        if value is not None:
            _store_constant(portable, name, value.clone())


def _store_constant(module: GraphModule, name: str, value: torch.Tensor) -> None:
    """Replace a constant of a graph; other graphs that share it keep theirs."""
    path, _, leaf = name.rpartition(".")
    holder = module.get_submodule(path)
    was_parameter = leaf in holder._parameters
    setattr(holder, leaf, nn.Parameter(value, requires_grad=False) if was_parameter else value)
