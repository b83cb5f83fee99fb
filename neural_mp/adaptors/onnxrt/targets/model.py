"""The representation of a model for a target, and its ops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.onnxrt.graph.edit import (
    get_known_sizes,
    iterate_node_constants,
    list_used_outputs,
    read_by,
)
from neural_mp.adaptors.onnxrt.graph.sessions import Runner
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.targets.quantization import (
    count_multiplications,
    keeps_scale,
    list_target_configs,
)
from neural_mp.core.graph import Op, OpGraph
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.space import Capability
from neural_mp.targets import TargetProfile, Widths
from neural_mp.targets.profile import FURTHER_OUTPUT, MOVES

#: Session setting by which ONNX Runtime computes pairs of Q/DQ ops as written: its fused integer
#: kernels, and those with weights in integers only, would round otherwise than a target does.
PLAIN_QDQ = {"session.disable_quant_qdq": "1"}


@dataclass(frozen=True, eq=False)
class TargetModel(OnnxModel):
    """A graph for a target, which the CPU simulates.

    Attributes:
        profile: the rules of the target.
    """

    profile: TargetProfile | None = None

    def create_session(self, program: ir.Model, **settings: Any) -> Runner:
        """Return a session that computes pairs of Q/DQ ops as written."""
        return Runner(program, self.weights_folder, self.provider, entries=PLAIN_QDQ, **settings)

    @property
    def target_profile(self) -> TargetProfile:
        """The rules of the target."""
        assert self.profile is not None
        return self.profile

    @cached_property
    def integer_configs(self) -> Mapping[str, tuple[OpConfig, ...]]:
        """Op → its configs in integers, the cheapest first; only ops that have one."""
        configs = self.configs_or_reasons
        return {name: own for name, own in configs.items() if isinstance(own, tuple) and own}

    @cached_property
    def searched_configs(self) -> Mapping[str, tuple[OpConfig, ...]]:
        """The configs in integers among which a search chooses; others are for plans alone."""
        profile, nodes = self.target_profile, self.structure.nodes
        return {
            name: tuple(
                config
                for config in own
                if (widths := Widths.from_config(config)) is not None
                and profile.is_searched(nodes[name].op_type, widths)
            )
            for name, own in self.integer_configs.items()
        }

    @cached_property
    def configs_or_reasons(self) -> Mapping[str, tuple[OpConfig, ...] | str]:
        """Op → its configs in integers, or why the op stays in float."""
        return {
            name: list_target_configs(n, self.target_profile)
            for name, n in self.structure.nodes.items()
        }

    @cached_property
    def tensor_names(self) -> Mapping[str, str]:
        """Value of the graph → the name of its tensor."""
        return {str(value.name): name for value, name in self.structure.names.items()}


def build_op_capabilities(model: TargetModel) -> dict[str, Capability]:
    """Return the capability of every op: its configs on the target, or why it stays in float."""
    capabilities = dict[str, Capability]()
    title = model.target_profile.title
    others: dict[Precision, str] = dict.fromkeys(_NOT_OFFERED, f"not offered for {title}")
    for name, node in model.structure.nodes.items():
        own = model.integer_configs.get(name)
        if own is not None:
            missing = {*_INTEGERS} - {config.precision for config in own}
            reasons = {
                p: f"{title} does not compute {node.op_type} in {p.bits} bits" for p in missing
            }
            capabilities[name] = Capability((*own, FP32), {**others, **reasons})
            continue
        moves = node.op_type in model.target_profile.same_scale
        text = MOVES if moves else str(model.configs_or_reasons[name])
        capabilities[name] = Capability(reasons={**others, **dict.fromkeys(_INTEGERS, text)})
    for name in model.structure.parts:
        reasons = {**others, **dict.fromkeys(_INTEGERS, FURTHER_OUTPUT)}
        capabilities[name] = Capability(reasons=reasons)
    return capabilities


_INTEGERS = (Precision.INT8, Precision.INT16)
#: Precisions that no plan for an accelerator holds.
_NOT_OFFERED = tuple(p for p in Precision if p not in (*_INTEGERS, Precision.FP32))


def build_graph(model: TargetModel) -> OpGraph:
    """Return every node with its edges: no op is fused into another."""
    structure = model.structure
    are_stored = model.target_profile.placement.outputs == "always"
    ops = [
        Op(
            name,
            node.op_type,
            tuple(dict.fromkeys(structure.names[v] for v in read_by(node) if v in structure.names)),
            weights=sum(constant.size for constant in iterate_node_constants(node)),
            moves_integers=are_stored and keeps_scale(node, model.target_profile),
            shape=get_known_sizes(node.outputs[0]) if node.outputs else None,
        )
        for name, node in structure.nodes.items()
    ]
    ops += (Op(part, structure.nodes[op].op_type, (op,)) for part, op in structure.parts.items())
    outputs = {structure.names[v] for v in model.program.graph.outputs if v in structure.names}
    step_inputs = [structure.names[value] for value in structure.given_to_bodies]
    return OpGraph(ops, [*model.signature.input_tensors, *step_inputs], sorted(outputs))


def count_op_work(static: ir.Model, samples: int) -> tuple[dict[str, float], dict[str, float]]:
    """Return op → multiplications, and op → written elements, per sample of a static graph."""
    macs, elements = dict[str, float](), dict[str, float]()
    for node in static.graph:
        name = str(node.name)
        macs[name] = count_multiplications(node) / samples
        shapes = (value.shape for value in list_used_outputs(node))
        sizes = (s.numpy() for s in shapes if s is not None and s.is_static())
        elements[name] = sum(map(math.prod, sizes)) / samples
    return macs, elements
