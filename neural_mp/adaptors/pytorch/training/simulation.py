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

from neural_mp.adaptors.common.code_packing import BitOrder, packed
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.pytorch import graph_edit as fx
from neural_mp.adaptors.pytorch import qdq_ops as ops
from neural_mp.adaptors.pytorch.canonicalize import source_modules
from neural_mp.adaptors.pytorch.casts import CAST, DTYPES, narrowed
from neural_mp.adaptors.pytorch.convert import write
from neural_mp.adaptors.pytorch.lowering import runnable_form
from neural_mp.adaptors.pytorch.model import Part, TorchModel, assembled
from neural_mp.adaptors.pytorch.quantizable_ops import CONVOLUTIONS, WEIGHTED
from neural_mp.adaptors.pytorch.recurrent import RECURRENT_INT8
from neural_mp.adaptors.pytorch.training.fake_quantize import (
    FakeGroups,
    FakeQuantizer,
    FakeWeight,
    round_dynamically,
)
from neural_mp.adaptors.pytorch.training.norms import NormedLayer, norm_source, rest_of
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.errors import ConfigurationError
from neural_mp.space import ResolvedPlan

aten = torch.ops.aten
_INFERENCE_NORM = aten._native_batch_norm_legit_no_training.default


@dataclass
class SimulatedPart:
    """The simulation of one captured graph.

    Attributes:
        module: the trainable graph.
        quantizers: node of the portable form that quantizes → name of its `FakeQuantizer`.
        weights: constants of a stored weight → its parameter and `FakeWeight` or `FakeGroups`.
        floats: constant of the portable form → its parameter.
        norms: constants of a stored weight and of the bias → its `NormedLayer`.
        origins: parameter or buffer of the trainable graph → its path in the user's model, or the
            path of a constant that the capture made.
    """

    module: GraphModule
    quantizers: dict[str, str] = field(default_factory=dict)
    weights: dict[tuple[str, ...], tuple[str, str]] = field(default_factory=dict)
    floats: dict[str, str] = field(default_factory=dict)
    norms: dict[tuple[str, ...], str] = field(default_factory=dict)
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


def simulated(
    given: TorchModel,
    model: TorchModel,
    plan: ResolvedPlan,
    ranges: Mapping[str, Range],
    schedule: TrainingSchedule,
) -> SimulatedModule:
    """Return the trainable simulation of a model; see `Simulation.simulated`."""
    original = given.original if given.original is not None else given.shell
    with torch.no_grad():
        converted = write(model, plan, ranges)
        parts = {
            path: _Simulator(
                model.parts[path].portable, part.portable, plan, schedule, original, path
            ).run()
            for path, part in converted.parts.items()
        }
    shell = None if model.shell is None else copy.deepcopy(model.shell).requires_grad_(False)
    network = assembled(shell, {path: part.module for path, part in parts.items()})
    made = SimulatedModule(network, schedule, Source(given, converted, parts))
    if not any(p.requires_grad for p in made.weights()):
        raise ConfigurationError(
            "the model must have float weights to train (requires_grad=True), got none; unfreeze "
            "a layer, or give the model before it was quantized or frozen"
        )
    return made.eval()


def _frozen_modules(module: nn.Module | None) -> frozenset[str]:
    """Return the paths of modules all of whose own parameters are frozen."""
    named = () if module is None else module.named_modules(remove_duplicate=False)
    own = {path: list(each.parameters(recurse=False)) for path, each in named}
    return frozenset(p for p, ws in own.items() if ws and not any(w.requires_grad for w in ws))


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
        self.frozen, self.path = _frozen_modules(original), path
        self.original = original if schedule.norm_steps else None
        self.given = fx.op_nodes(given)
        self.source = given
        self.module = fx.shallow_copy(portable)
        self.plan, self.learned = plan, schedule.learn_scales
        self.found = SimulatedPart(self.module)
        self.quantizer_of: dict[str, str] = {}

    def run(self) -> SimulatedPart:
        self.module._forward_pre_hooks.clear()
        self.module._forward_pre_hooks_with_kwargs.clear()
        nodes = list(self.module.graph.nodes)
        for node in nodes:
            if node.target is ops.quantize:
                self.quantize(node)
            elif node.target is ops.quantize_dynamic:
                self.quantize_dynamically(node)
            elif node.target is _INFERENCE_NORM:
                _differentiable_norm(node)
        for node in nodes:
            if node.target in WEIGHTED or node.target in RECURRENT_INT8:
                self.weights(node)
                self.norm(node)
        self.module.graph.eliminate_dead_code()
        self.floats()
        fx.finish(self.module)
        return self.found

    def quantize(self, node: Node) -> None:
        """Replace a quantize node and its dequantize nodes by one module."""
        x, scale, zero_point = node.args
        owner = self.plan.flow.scale_owner.get(fx.tensor_name(x), fx.tensor_name(x))
        if owner not in self.quantizer_of:
            self.quantizer_of[owner] = self.add(
                "quantizer", FakeQuantizer(QuantParams(scale, zero_point), self.learned)
            )
        self.found.quantizers[node.name] = self.quantizer_of[owner]
        with self.module.graph.inserting_before(node):
            rounded = self.module.graph.call_module(self.quantizer_of[owner], (x,))
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
        """Replace a quantization over the range of each call."""
        parts = list(node.users)
        (pair,) = {user for part in parts for user in part.users}
        with self.module.graph.inserting_before(node):
            rounded = self.module.graph.call_function(round_dynamically, node.args)
        rounded.meta["val"] = pair.meta["val"]
        pair.replace_all_uses_with(rounded)
        for each in (pair, *parts, node):
            self.module.graph.erase_node(each)

    def weights(self, layer: Node) -> None:
        """Replace the stored integers of a layer by the float weights they were rounded from."""
        op = str(layer.meta.get(fx.OP_NAME))
        for position, (mine, theirs) in enumerate(
            zip(_weights(layer), _weights(self.given[op]), strict=True)
        ):
            if mine.target not in (ops.dequantize_weight, ops.dequantize_grouped):
                continue
            key = tuple(str(part.target) for part in mine.args if isinstance(part, Node))
            if key not in self.found.weights:
                stored = [fx.attribute(self.module, name).detach() for name in key]
                weight = fx.constant(self.source, theirs)
                config = self.plan.plan.get(op)
                name = f"{_plain(op)}_weight" + (f"_{position}" if position else "")
                if mine.target is ops.dequantize_weight:
                    limit = weight_qmax(config.weight if config is not None else None)
                    fake: nn.Module = FakeWeight(stored[1], limit, self.learned)
                else:
                    bits = mine.args[3] if len(mine.args) > 3 else 4
                    fake = FakeGroups(stored[1], stored[2], int(bits))
                start = _start(fake, weight, mine.target(*stored, *mine.args[len(key) :]))
                value = fx.attribute(self.source, str(theirs.target)) if weight is not None else 0
                parameter = self.parameter(name, start, self.trains(value, layer))
                self.found.weights[key] = parameter, self.add("weight_quantizer", fake)
                self.found.origins[parameter] = self.origin(theirs)
            parameter, fake_name = self.found.weights[key]
            with self.module.graph.inserting_before(mine):
                read = self.module.graph.get_attr(parameter)
                rounded = self.module.graph.call_module(fake_name, (read,))
            read.meta["val"] = rounded.meta["val"] = mine.meta["val"]
            layer.replace_input_with(mine, rounded)

    def norm(self, layer: Node) -> None:
        """Let a batch norm folded into a layer be trained, if its source is known."""
        if layer.target not in CONVOLUTIONS:
            return
        given = self.given[str(layer.meta.get(fx.OP_NAME))]
        weight = fx.constant(self.source, fx.arguments(given)["weight"])
        source = norm_source(self.original, given, self.path, weight)
        if source is None or layer.args[1].op != "call_module":
            return
        rounded = layer.args[1]
        fake = self.module.get_submodule(rounded.target)
        bias = fx.arguments(layer)["bias"]
        (key,) = (k for k, (_, name) in self.found.weights.items() if name == rounded.target)
        users = sum(n.target == rounded.target for n in self.module.graph.nodes)
        if users > 1 or not isinstance(fake, FakeWeight):
            return  # another layer reads the same weight
        name = self.add("normed_layer", NormedLayer(source, layer.target, rest_of(layer), fake))
        self.module.delete_submodule(rounded.target)  # now of the normed layer
        del self.found.weights[key]
        self.found.norms[(*key, str(bias.target))] = name
        for own, path in source.origins.items():
            self.found.origins[f"{name}.{own}"] = path
        with self.module.graph.inserting_before(layer):
            result = self.module.graph.call_module(name, (layer.args[0],))
        result.meta = dict(layer.meta)
        layer.replace_all_uses_with(result)
        self.module.graph.erase_node(layer)
        self.module.graph.erase_node(rounded)  # the next weight gets the name of its module

    def floats(self) -> None:
        """Make the remaining float weights and biases trainable."""
        for node in list(self.module.graph.nodes):
            if node.op != "get_attr" or str(node.target) in self.found.floats.values():
                continue
            value, name = fx.attribute(self.module, str(node.target)), str(node.target)
            known = {parameter for parameter, _ in self.found.weights.values()}
            if not fx.is_float(value) or name in known:
                continue
            is_parameter = isinstance(value, nn.Parameter)
            if not is_parameter and not any(_reads_as_weight(user, node) for user in node.users):
                continue
            if name not in self.found.floats:
                trained = all(self.trains(value, user) for user in node.users)
                stored = value.detach().float()
                self.found.floats[name] = self.parameter(_plain(name), stored, trained)
                self.found.origins[self.found.floats[name]] = self.origin(node)
            with self.module.graph.inserting_before(node):
                read = self.module.graph.get_attr(self.found.floats[name])
                read.meta["val"] = value
                if value.dtype in DTYPES.values():
                    read = self.module.graph.call_function(CAST, (read,), {"dtype": value.dtype})
                    read.meta["val"] = value
            node.replace_all_uses_with(read)

    def trains(self, value: object, reader: Node) -> bool:
        """Whether a constant of a layer is trained: unless the user froze it."""
        if isinstance(value, nn.Parameter) and not value.requires_grad:
            return False
        # Folded weights are new tensors, so look at the module that they come from.
        owners = source_modules(reader, self.path)
        return not owners or owners[0] not in self.frozen

    def origin(self, constant: Node) -> str:
        """Return the path of a constant in the whole model."""
        return ".".join(filter(None, (self.path, str(constant.target))))

    def parameter(self, name: str, value: torch.Tensor, trained: bool) -> str:
        """Register a copy of a weight, and return its name."""
        free, number = f"trained_{name}", 2
        while hasattr(self.module, free):
            free, number = f"trained_{name}_{number}", number + 1
        self.module.register_parameter(free, nn.Parameter(value.clone(), requires_grad=trained))
        return free

    def add(self, word: str, module: nn.Module) -> str:
        """Register a module, and return its name."""
        number = 0
        while hasattr(self.module, f"{word}_{number}"):
            number += 1
        self.module.add_module(f"{word}_{number}", module)
        return f"{word}_{number}"


def _plain(name: str) -> str:
    return name.replace(".", "_")


def _weights(layer: Node) -> list[Node]:
    """Return the weights of a layer, or all tensors of a recurrent layer."""
    args = fx.arguments(layer)
    return list(args["params"]) if layer.target in RECURRENT_INT8 else [args["weight"]]


def _reads_as_weight(user: Node, constant: Node) -> bool:
    if user.target in RECURRENT_INT8:
        return constant in fx.arguments(user)["params"]
    return user.target in WEIGHTED and constant in user.args[1:]


def _differentiable_norm(norm: Node) -> None:
    """Call a batch norm in inference mode by an op with a derivative."""
    image, weight, bias, mean, variance, momentum, epsilon = norm.args
    norm.target = aten.native_batch_norm.default
    norm.args = (image, weight, bias, mean, variance, False, momentum, epsilon)


def _start(fake: nn.Module, weight: torch.Tensor | None, rounded: torch.Tensor) -> torch.Tensor:
    """Return the float weight, with the stored value where it rounds to another integer.

    Corrections may store other integers than the nearest.
    """
    if weight is None or weight.shape != rounded.shape:
        return rounded
    weight = weight.float()
    return torch.where(fake(weight) == rounded, weight, rounded)


def finished(module: SimulatedModule) -> TorchModel:
    """Return the converted model with the weights and scales of a simulation."""
    source: Source = module.source
    parts = {}
    with torch.no_grad():
        for path, part in source.converted.parts.items():
            trained = module.part(path)
            parts[path] = _written(part, source.parts[path], trained)
    return replace(source.converted, parts=parts)


def _written(part: Part, names: SimulatedPart, trained: nn.Module) -> Part:
    """Return a part of the converted model with the numbers of its trained simulation."""
    portable = fx.shallow_copy(part.portable)
    for key, (parameter, fake_name) in names.weights.items():
        weight, fake = getattr(trained, parameter), getattr(trained, fake_name)
        if isinstance(fake, FakeWeight):
            values = [fake.integers(weight), fake.scales.clone()]
        else:
            codes = packed(fake.codes(weight).numpy(), fake.bits, BitOrder.UPPER_FIRST)
            values = [torch.from_numpy(codes.copy())]
        for name, value in zip(key, values, strict=False):
            _store(portable, name, value)
    for key, name in names.norms.items():
        normed = getattr(trained, name)
        weight, bias = normed.folded()
        fake = normed.fake
        for constant, value in zip(
            key, (fake.integers(weight), fake.scales.clone(), bias), strict=True
        ):
            _store(portable, constant, value)
    for name, parameter in names.floats.items():
        before, value = fx.attribute(portable, name), getattr(trained, parameter).detach()
        _store(portable, name, narrowed(value, before.dtype).clone())
    for node in list(portable.graph.nodes):
        if node.op == "call_function" and node.name in names.quantizers:
            encoding = getattr(trained, names.quantizers[node.name]).encoding
            node.args = (node.args[0], encoding.scale, encoding.zero_point)
            for pair in list(node.users):
                pair.args = (node, encoding.scale, encoding.zero_point, *pair.args[3:])
    portable = fx.finish(portable)
    return Part(portable, runnable_form(portable), part.example, True)


def _store(module: GraphModule, name: str, value: torch.Tensor) -> None:
    """Replace a constant of a graph; other graphs that share it keep theirs."""
    owner, _, leaf = name.rpartition(".")
    holder = module.get_submodule(owner)
    was_parameter = leaf in holder._parameters
    setattr(holder, leaf, nn.Parameter(value, requires_grad=False) if was_parameter else value)
