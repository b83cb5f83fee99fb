"""Documents of golden files: what the tool decides about a net, in a form for review.

Times, sizes of files, versions and paths are no part of a document, as they differ from machine to
machine.
"""

from __future__ import annotations

from typing import Any

from golden_nets import NETS

from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import CPU_PRECISIONS
from neural_mp.space import Capability, TuningSpace

#: Targets whose flags decide, whatever CPU computes the document.
TARGETS = ("avx2", "vnni", "amx")


def decisions(framework: str, net: str) -> dict[str, Any]:
    """Return the ops of a net, what each can run in, and the fastest plan, for each target."""
    adaptor = get_adaptor_named(framework)
    source, example = NETS[framework, net]()
    model = adaptor.load(source, example=example)
    spaces = {
        target: adaptor.space(model, Hardware(cores=2).for_target(target)) for target in TARGETS
    }
    graph = spaces["avx2"].graph
    document: dict[str, Any] = {
        "ops": {op.name: f"{op.type} of {', '.join(op.inputs)}" for op in graph}
    }
    previous: dict[str, Any] = {}
    for target, space in spaces.items():
        parts = _choices(space)
        document[target] = {
            name: part for name, part in parts.items() if previous.get(name) != part
        }
        previous = parts
    return document


def _choices(space: TuningSpace) -> dict[str, Any]:
    """Return the capabilities and the consequences of the fastest plan."""
    plan = space.fastest_plan()
    resolved = space.resolve(plan)
    flow = resolved.flow
    capabilities: dict[str, list[str]] = {}
    for op, capability in space.capabilities.items():
        capabilities.setdefault(_words(capability), []).append(op)
    effective: dict[str, list[str]] = {}
    for op, precision in resolved.effective.items():
        effective.setdefault(str(precision), []).append(op)
    return {
        "capabilities": {text: " ".join(ops) for text, ops in capabilities.items()},
        "plan": {op: str(config) for op, config in plan.configs.items()},
        "effective": {precision: " ".join(ops) for precision, ops in effective.items()},
        "quantized outputs": " ".join(sorted(flow.int8_outputs)),
        "scales": {
            owner: " ".join(members)
            for owner, members in flow.scale_members.items()
            if members != (owner,)
        },
    }


def _words(capability: Capability) -> str:
    """Return the configurations, and the refused precisions by reason, in one line."""
    refusals: dict[str, list[str]] = {}
    for precision in CPU_PRECISIONS:
        reason = capability.refusal_reason(precision)
        if reason is not None:
            refusals.setdefault(reason, []).append(str(precision))
    parts = [", ".join(map(str, capability.configs))]
    parts += [f"{' '.join(refused)}: {reason}" for reason, refused in refusals.items()]
    return "; ".join(parts)
