"""Trainable simulation of a converted model, made from its portable form.

The quantize/dequantize pairs of the conversion are replaced by modules with the same scales and
zero points, and stored integers by the float weights that they were rounded from. The trained
numbers are written back into the same portable form, so what is trained is what runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.common.weights.grouped_weight import BitOrder, pack_codes
from neural_mp.adaptors.pytorch.capture.canonicalize import list_source_modules
from neural_mp.adaptors.pytorch.convert import convert_graphs
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph.casts import CAST, DTYPES, cast_saturating
from neural_mp.adaptors.pytorch.graph.model import Part, TorchModel, assemble_module
from neural_mp.adaptors.pytorch.graph.quantizable_ops import CONVOLUTIONS, WEIGHTED
from neural_mp.adaptors.pytorch.graph.recurrent import RECURRENT_INT8
from neural_mp.adaptors.pytorch.kernels.lowering import lower_to_kernels
from neural_mp.adaptors.pytorch.training.fake_quantize import (
    RowFormat,
    StoredRows,
    round_dynamically,
)
from neural_mp.adaptors.pytorch.training.norms import NormedLayer, NormSource, find_norm_source
from neural_mp.adaptors.pytorch.training.scales import Scales
from neural_mp.adaptors.pytorch.training.simulated_module import (
    PLACE,
    SimulatedModule,
    name_places,
)
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.errors import ConfigurationError
from neural_mp.space import ResolvedPlan

aten = torch.ops.aten
_INFERENCE_NORM = aten._native_batch_norm_legit_no_training.default
#: Names of the constants of a stored weight.
Key = tuple[str, ...]


@dataclass
class SimulatedPart:
    """The simulation of one captured graph.

    Attributes:
        module: the trainable graph.
        scales: name of its `Scales`; empty if it has none.
        quantizers: node of the portable form that quantizes → number of its tensor in `Scales`.
        weights: constants of a stored weight → its parameter.
        floats: constant of the portable form → its parameter.
        norms: constants of a stored weight and of the bias → its `NormedLayer`.
        numbers: constants of a stored weight → its number in `Scales`.
        origins: parameter or buffer of the trainable graph → its path in the user's model, or the
            path of a constant that the capture made.
    """

    module: GraphModule
    scales: str = ""
    quantizers: dict[str, int] = field(default_factory=dict)
    weights: dict[Key, str] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    norms: dict[tuple[str, ...], str] = field(default_factory=dict)
    numbers: dict[Key, int] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """Origin of a simulation, shared by its copies.

    Attributes:
        given: the FP32 model.
        converted: the model as converted before training.
        parts: path of a part → its simulation as made; copies have graphs of their own.
    """

    given: TorchModel
    converted: TorchModel
    parts: Mapping[str, SimulatedPart]

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self


def simulate_model(
    given: TorchModel,
    model: TorchModel,
    plan: ResolvedPlan,
    ranges: Mapping[str, Range],
    schedule: TrainingSchedule,
) -> SimulatedModule:
    """Return the trainable simulation of a model; see `Simulation.simulated`."""
    original = given.original if given.original is not None else given.shell
    with torch.no_grad():
        converted = convert_graphs(model, plan, ranges)
        parts = {
            path: _Simulator(
                model.parts[path].portable, part.portable, plan, schedule, original, path
            ).build_part()
            for path, part in converted.parts.items()
        }
    shell = None if model.shell is None else copy.deepcopy(model.shell).requires_grad_(False)
    network = assemble_module(shell, {path: part.module for path, part in parts.items()})
    simulation = SimulatedModule(network, schedule, Source(given, converted, parts))
    if not any(p.requires_grad for p in simulation.weights()):
        raise ConfigurationError(
            "the model must have float weights to train (requires_grad=True), got none; unfreeze "
            "a layer, or give the model before it was quantized or frozen"
        )
    return simulation.eval()


class _Simulator:
    """Rewriter of one portable graph to its simulation."""

    def __init__(
        self,
        given: GraphModule,
        portable: GraphModule,
        plan: ResolvedPlan,
        schedule: TrainingSchedule,
        original: nn.Module | None,
        path: str,
    ) -> None:
        # Paths of modules all of whose own parameters are frozen.
        modules = () if original is None else original.named_modules(remove_duplicate=False)
        own = {name: list(module.parameters(recurse=False)) for name, module in modules}
        self.frozen = {n for n, ws in own.items() if ws and not any(w.requires_grad for w in ws)}
        self.path = path
        self.original = original if schedule.norm_steps else None
        self.given = fx.map_op_nodes(given)
        self.source = given
        self.module = fx.copy_graph_shallowly(portable)
        self.plan, self.learned = plan, schedule.learn_scales
        self.found = SimulatedPart(self.module)
        self.encodings: dict[str, QuantParams] = {}
        self.rows: dict[Key, StoredRows] = {}
        self.readers: dict[Key, list[tuple[Node, Node]]] = {}

    def build_part(self) -> SimulatedPart:
        self.module._forward_pre_hooks.clear()
        self.module._forward_pre_hooks_with_kwargs.clear()
        nodes = list(self.module.graph.nodes)
        self.found.scales = self.add_module("scales", nn.Module())
        first = next(n for n in nodes if n.op not in ("placeholder", "get_attr"))
        with self.module.graph.inserting_before(first):
            self.rounding = self.module.graph.call_module(self.found.scales)
        for node in nodes:
            if node.target is ops.quantize:
                self.replace_quantize(node)
            elif node.target is ops.quantize_dynamic:
                self.quantize_dynamically(node)
            elif node.target is _INFERENCE_NORM:  # made differentiable
                *tensors, momentum, epsilon = node.args
                node.target = aten.native_batch_norm.default
                node.args = (*tensors, False, momentum, epsilon)
        for node in nodes:
            if node.target in WEIGHTED or node.target in RECURRENT_INT8:
                self.make_float_weights(node)
        self.round_weights()
        self.module.graph.eliminate_dead_code()
        self.train_floats()
        name_places(self.module.graph)
        self.add_scales()
        fx.finish_graph(self.module)
        return self.found

    def replace_quantize(self, node: Node) -> None:
        """Replace a quantize node and its dequantize nodes by one call."""
        x, scale, zero_point = node.args
        root = self.plan.flow.scale_owner.get(fx.get_tensor_name(x), fx.get_tensor_name(x))
        self.encodings.setdefault(root, QuantParams(scale, zero_point))
        self.found.quantizers[node.name] = index = list(self.encodings).index(root)
        with self.module.graph.inserting_before(node):
            rounded = self.module.graph.call_method("round_tensor", (self.rounding, x, index))
        rounded.meta["val"] = x.meta["val"].float()
        for pair in list(node.users):
            dtype = pair.args[3]
            result = rounded
            if dtype is not torch.float32:
                with self.module.graph.inserting_before(pair):
                    result = self.module.graph.call_function(CAST, (rounded,), {"dtype": dtype})
                result.meta["val"] = pair.meta["val"]
            pair.replace_all_uses_with(result)

    def quantize_dynamically(self, node: Node) -> None:
        parts = list(node.users)
        (pair,) = {user for part in parts for user in part.users}
        with self.module.graph.inserting_before(node):
            rounded = self.module.graph.call_function(round_dynamically, node.args)
        rounded.meta["val"] = pair.meta["val"]
        pair.replace_all_uses_with(rounded)
        for obsolete in (pair, *parts, node):
            self.module.graph.erase_node(obsolete)

    def make_float_weights(self, layer: Node) -> None:
        """Make the float weights that the stored integers of a layer were rounded from."""
        op = str(layer.meta.get(fx.OP_NAME))
        for position, (mine, theirs) in enumerate(
            zip(_list_layer_weights(layer), _list_layer_weights(self.given[op]), strict=True)
        ):
            if mine.target not in (ops.dequantize_weight, ops.dequantize_grouped):
                continue
            key = tuple(str(part.target) for part in mine.args if isinstance(part, Node))
            self.readers.setdefault(key, []).append((layer, mine))
            if key in self.rows:
                continue
            stored = [fx.get_attribute(self.module, name).detach() for name in key]
            weight = fx.get_constant(self.source, theirs)
            shape = mine.meta["val"].shape
            if mine.target is ops.dequantize_weight:
                config = self.plan.plan.get(op)
                limit = weight_qmax(config.weight if config is not None else None)
                form = RowFormat.per_channel(shape, limit)
            else:
                bits = mine.args[3] if len(mine.args) > 3 else 4
                form = RowFormat.per_group(shape, stored[1].shape[-1], int(bits))
            self.rows[key] = StoredRows(form, *stored[1:])
            start = _choose_initial_weight(
                self.rows[key], weight, mine.target(*stored, *mine.args[len(key) :])
            )
            value = fx.get_attribute(self.source, str(theirs.target)) if weight is not None else 0
            name = f"{op.replace('.', '_')}_weight" + (f"_{position}" if position else "")
            self.found.weights[key] = self.add_parameter(name, start, self.is_trained(value, layer))
            self.found.origins[self.found.weights[key]] = self.constant_origin(theirs)

    def round_weights(self) -> None:
        """Let layers read rounded weights, with their norms where these are trained."""
        graph = self.module.graph
        for number, (key, readers) in enumerate(self.readers.items()):
            source = self.find_norm_source(key)
            if source is not None:
                self.insert_norm(key, source, number)
                continue
            layer, mine = readers[0]
            with graph.inserting_before(mine):
                weight = graph.get_attr(self.found.weights[key])
                rounded = graph.call_method("round_weight", (self.rounding, weight, number))
            location = f"a weight of layer {layer.meta[fx.OP_NAME]!r}"
            for node in (weight, rounded):
                node.meta = {"val": mine.meta["val"], PLACE: location}
            for layer, mine in readers:
                layer.replace_input_with(mine, rounded)

    def add_scales(self) -> None:
        if not self.encodings and not self.rows:
            self.found.scales = ""
            return
        encodings, rows = list(self.encodings.values()), list(self.rows.values())
        self.module.set_submodule(self.found.scales, Scales(encodings, rows, self.learned))
        self.found.numbers = {key: number for number, key in enumerate(self.rows)}

    def find_norm_source(self, key: Key) -> NormSource | None:
        """Return the batch norm folded into the only layer that reads a weight, if it is known."""
        (layer, _), *rest = self.readers[key]
        if rest or layer.target not in CONVOLUTIONS or self.rows[key].form.has_offsets:
            return None
        op = self.given[str(layer.meta.get(fx.OP_NAME))]
        weight = fx.get_constant(self.source, fx.get_arguments(op)["weight"])
        return find_norm_source(self.original, op, self.path, weight)

    def insert_norm(self, key: Key, source: NormSource, number: int) -> None:
        ((layer, _),) = self.readers[key]
        arguments = fx.get_arguments(layer)
        bias, after_bias = arguments["bias"], tuple(arguments.values())[3:]
        name = self.add_module("normed_layer", NormedLayer(source, layer.target, after_bias))
        del self.found.weights[key]
        self.found.norms[(*key, str(bias.target))] = name
        for own, path in source.parameter_origins.items():
            self.found.origins[f"{name}.{own}"] = path
        with self.module.graph.inserting_before(layer):
            result = self.module.graph.call_module(name, (layer.args[0], self.rounding, number))
        result.meta = dict(layer.meta)
        layer.replace_all_uses_with(result)
        self.module.graph.erase_node(layer)

    def train_floats(self) -> None:
        for node in list(self.module.graph.nodes):
            if node.op != "get_attr" or str(node.target) in self.found.floats.values():
                continue
            value, name = fx.get_attribute(self.module, str(node.target)), str(node.target)
            if not fx.is_float(value) or name in self.found.weights.values():
                continue
            is_parameter = isinstance(value, nn.Parameter)
            if not is_parameter and not any(_reads_as_weight(user, node) for user in node.users):
                continue
            if name not in self.found.floats:
                trained = all(self.is_trained(value, user) for user in node.users)
                stored = value.detach().float()
                self.found.floats[name] = self.add_parameter(
                    name.replace(".", "_"), stored, trained
                )
                self.found.origins[self.found.floats[name]] = self.constant_origin(node)
            with self.module.graph.inserting_before(node):
                attr = self.module.graph.get_attr(self.found.floats[name])
                attr.meta["val"] = value
                if value.dtype in DTYPES.values():
                    attr = self.module.graph.call_function(CAST, (attr,), {"dtype": value.dtype})
                    attr.meta["val"] = value
            node.replace_all_uses_with(attr)

    def is_trained(self, value: object, reader: Node) -> bool:
        """Whether a constant of a layer is trained: unless the user froze it."""
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            return False
        # Folded weights are new tensors, so look at the module that they come from.
        owners = list_source_modules(reader, self.path)
        return not owners or owners[0] not in self.frozen

    def constant_origin(self, constant: Node) -> str:
        """Return the path of a constant in the whole model."""
        return ".".join(filter(None, (self.path, str(constant.target))))

    def add_parameter(self, name: str, value: torch.Tensor, trained: bool) -> str:
        free, number = f"trained_{name}", 2
        while hasattr(self.module, free):
            free, number = f"trained_{name}_{number}", number + 1
        self.module.register_parameter(free, nn.Parameter(value.clone(), requires_grad=trained))
        return free

    def add_module(self, prefix: str, module: nn.Module) -> str:
        number = 0
        while hasattr(self.module, f"{prefix}_{number}"):
            number += 1
        self.module.add_module(f"{prefix}_{number}", module)
        return f"{prefix}_{number}"


def _list_layer_weights(layer: Node) -> list[Node]:
    args = fx.get_arguments(layer)
    return list(args["params"]) if layer.target in RECURRENT_INT8 else [args["weight"]]


def _reads_as_weight(user: Node, constant: Node) -> bool:
    if user.target in RECURRENT_INT8:
        return constant in fx.get_arguments(user)["params"]
    return user.target in WEIGHTED and constant in user.args[1:]


def _choose_initial_weight(
    rows: StoredRows, weight: torch.Tensor | None, rounded: torch.Tensor
) -> torch.Tensor:
    """Return the float weight, with the stored value where it rounds to another integer.

    Corrections may store other integers than the nearest.
    """
    if weight is None or weight.shape != rounded.shape:
        return rounded
    weight = weight.float()
    return torch.where(rows.fake_quantize(weight) == rounded, weight, rounded)


def finish_simulation(module: SimulatedModule) -> TorchModel:
    """Return the converted model with the weights and scales of a simulation."""
    source: Source = module.source
    with torch.no_grad():
        parts = {
            path: _write_part(part, source.parts[path], module.get_part(path))
            for path, part in source.converted.parts.items()
        }
    return replace(source.converted, parts=parts)


def _write_part(part: Part, names: SimulatedPart, trained: nn.Module) -> Part:
    portable = fx.copy_graph_shallowly(part.portable)
    table = getattr(trained, names.scales) if names.scales else Scales([], [], False)
    for key, parameter in names.weights.items():
        stored = table.stored_rows(names.numbers[key])
        _store_weight(portable, key, stored, getattr(trained, parameter).detach())
    for key, name in names.norms.items():
        weight, bias = getattr(trained, name).fold_norm()
        _store_weight(portable, key[:-1], table.stored_rows(names.numbers[key[:-1]]), weight)
        _store_constant(portable, key[-1], bias)
    for name, parameter in names.floats.items():
        original, value = fx.get_attribute(portable, name), getattr(trained, parameter).detach()
        _store_constant(portable, name, cast_saturating(value, original.dtype).clone())
    encodings = table.quant_params()
    for node in list(portable.graph.nodes):
        if node.op == "call_function" and node.name in names.quantizers:
            encoding = encodings[names.quantizers[node.name]]
            node.args = (node.args[0], encoding.scale, encoding.zero_point)
            for pair in list(node.users):
                pair.args = (node, encoding.scale, encoding.zero_point, *pair.args[3:])
    portable = fx.finish_graph(portable)
    return Part(portable, lower_to_kernels(portable), part.example, True)


def _store_weight(
    portable: GraphModule, key: Key, stored: StoredRows, weight: torch.Tensor
) -> None:
    integers = stored.to_integers(weight)
    if stored.form.has_offsets:
        codes = (integers - stored.form.limits[0]).to(torch.uint8).numpy()
        integers = torch.from_numpy(
            pack_codes(codes, stored.form.bits, BitOrder.UPPER_FIRST).copy()
        )
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
