"""Fusion of consecutive small ops of a simulated graph to runs."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.training.fused_runs import FusedRun, Program, RoundedGroup
from neural_mp.adaptors.pytorch.training.run_steps import STEPS, Quantize, Step
from neural_mp.adaptors.pytorch.training.scales import Scales
from neural_mp.adaptors.pytorch.training.weight_rows import RowFormat, StoredRows, grouped

#: Methods of `Rounding`, and the position of the number of the tensor or weight.
TENSOR, WEIGHT, NUMBER = "tensor", "weight", 2


@dataclass(frozen=True)
class _Run:
    """Ops that follow each other.

    Attributes:
        steps: the ops.
        groups: roundings of small weights that only these ops read, those together that are
            rounded together.
    """

    steps: tuple[Node, ...]
    groups: tuple[tuple[Node, ...], ...]

    @property
    def tensors(self) -> list[Node]:
        """Ops that quantize tensors."""
        return [node for node in self.steps if _calls(node, TENSOR)]


def fuse_runs(
    module: GraphModule,
    rounding: Node,
    encodings: Sequence[QuantParams],
    rows: Sequence[StoredRows],
    learned: bool,
) -> tuple[Scales, list[int], list[int]]:
    """Replace the runs of a graph by modules.

    Args:
        module: the graph.
        rounding: the result of its `Scales`.
        encodings: scales and zero points of its tensors.
        rows: its weights.
        learned: whether scales are learned.

    Returns:
        The scales in the order in which the runs read them, and the new numbers of the tensors
        and of the weights.
    """
    runs = _runs_of(module.graph, [row.form for row in rows])
    tensors = _parts([[_number(node) for node in run.tensors] for run in runs], len(encodings))
    groups = [[_number(node) for node in group] for run in runs for group in run.groups]
    groups = _parts(groups, len(rows))
    table = Scales(
        [[encodings[number] for number in part] for part in tensors],
        [[rows[number] for number in part] for part in groups],
        learned,
    )
    orders = _order(tensors), _order(groups)
    _renumber(module.graph, *orders)
    for run in runs:
        _fuse(module, rounding, table, run)
    return table, *orders


def _parts(parts: list[list[int]], count: int) -> list[list[int]]:
    """Return the parts that are not empty, and the remaining numbers each in one of its own."""
    assigned = {number for part in parts for number in part}
    rest = [[number] for number in range(count) if number not in assigned]
    return [*filter(None, parts), *rest]


def _order(parts: list[list[int]]) -> list[int]:
    """Return the new number of each old one, which counts in the order of the parts."""
    old = [number for part in parts for number in part]
    return sorted(range(len(old)), key=old.__getitem__)


def _runs_of(graph: Graph, forms: Sequence[RowFormat]) -> list[_Run]:
    """Return the runs of a graph, given the forms of its weights."""
    readers = Counter(node.args[NUMBER] for node in graph.nodes if _calls(node, TENSOR))
    runs: list[list[Node]] = [[]]
    for node in graph.nodes:
        if _is_step(node, readers):
            runs[-1].append(node)
        elif node.op != "get_attr" and not _is_small_weight(node, forms):
            runs.append([])
    return [_run(steps, forms) for steps in runs if len(steps) > 1]


def _run(steps: Sequence[Node], forms: Sequence[RowFormat]) -> _Run:
    inputs = dict.fromkeys(source for node in steps for source in node.all_input_nodes)
    weights = [
        source
        for source in inputs
        if _is_small_weight(source, forms) and all(user in steps for user in source.users)
    ]
    groups = grouped([forms[_number(node)] for node in weights])
    return _Run(tuple(steps), tuple(tuple(weights[index] for index in group) for group in groups))


def _calls(node: Node, method: str) -> bool:
    return node.op == "call_method" and node.target == method


def _number(node: Node) -> int:
    """Return the number of the tensor or weight that a node rounds."""
    number = node.args[NUMBER]
    assert isinstance(number, int)
    return number


def _is_small_weight(node: Node, forms: Sequence[RowFormat]) -> bool:
    return _calls(node, WEIGHT) and forms[_number(node)].is_small


def _is_step(node: Node, readers: Counter[object]) -> bool:
    """Whether an op may be in a run: all its tensors are float32, and sums do not broadcast.

    A scale that several tensors have in common is read elsewhere, too.
    """
    if _calls(node, TENSOR):
        return readers[node.args[NUMBER]] == 1 and _is_float32(node.args[1])
    if node.target not in STEPS:
        return False
    sources = node.all_input_nodes
    if node.target is torch.ops.aten.add.Tensor:
        shapes = {fx.sizes_of_result(tensor) for tensor in (node, *sources)}
        if node.kwargs or len(shapes) > 1 or not all(isinstance(a, Node) for a in node.args):
            return False
    return all(map(_is_float32, (node, *sources)))


def _is_float32(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def _renumber(graph: Graph, tensors: Sequence[int], weights: Sequence[int]) -> None:
    """Set new numbers of tensors and weights, given by their old ones."""
    for node in graph.nodes:
        if _calls(node, TENSOR):
            node.update_arg(NUMBER, tensors[_number(node)])
        elif _calls(node, WEIGHT) or (node.op == "call_module" and len(node.args) > NUMBER):
            # The modules are layers with a trained norm, which round their weight themselves.
            node.update_arg(NUMBER, weights[_number(node)])


def _fuse(module: GraphModule, rounding: Node, table: Scales, run: _Run) -> None:
    """Replace the ops of a run by one module."""
    weights = [node for group in run.groups for node in group]
    nodes = [*weights, *run.steps]
    inputs = list(dict.fromkeys(s for n in nodes for s in n.all_input_nodes if s not in nodes))
    if rounding in inputs:
        inputs.remove(rounding)
    results = [node for node in run.steps if any(user not in nodes for user in node.users)]
    program = _program(table, run, inputs, results)
    name = f"run_{sum(isinstance(child, FusedRun) for child in module.children())}"
    module.add_module(name, FusedRun(_graph_of(nodes, [rounding, *inputs], results), program))
    with module.graph.inserting_after(run.steps[-1]):
        every = module.graph.call_module(name, (rounding, *inputs))
    with module.graph.inserting_after(every):
        for index, node in enumerate(results):
            result = module.graph.call_function(operator.getitem, (every, index))
            result.meta = dict(node.meta)
            node.replace_all_uses_with(result, lambda user: user not in nodes)
    for node in reversed(nodes):
        module.graph.erase_node(node)


def _program(table: Scales, run: _Run, inputs: Sequence[Node], results: Sequence[Node]) -> Program:
    tensors = run.tensors
    relus = {node for node in run.steps if _is_only_quantized(node, run.steps)}
    computed = [node for node in run.steps if node not in relus]
    values = [*inputs, *[node for group in run.groups for node in group], *computed]
    slots = {node: len(tensors) + index for index, node in enumerate(values)}
    steps: list[Step] = []
    for node in run.steps:
        sources = tuple(slots[arg] for arg in node.args if isinstance(arg, Node) and arg in slots)
        if _calls(node, TENSOR):
            x, of_relu = node.args[1], node.args[1] in relus
            source = slots[x.args[0] if of_relu else x]
            read_log = source, tensors.index(node)
            steps.append(Quantize(read_log, slots[node], _number(node), of_relu))
        elif node not in relus:
            steps.append(STEPS[node.target](sources, slots[node]))
    groups = []
    for group in run.groups:
        part = table.weights[_number(group[0])].part
        weights = tuple(slots[source] for node in group for source in node.all_input_nodes[1:])
        rounded = tuple(slots[node] for node in group)
        groups.append(RoundedGroup(part, table.groups[part - table.tensor_parts], weights, rounded))
    part_of_tensors = table.tensors[_number(tensors[0])].part if tensors else None
    last = tuple(slots[node] for node in results)
    return Program(part_of_tensors, len(inputs), tuple(groups), tuple(steps), last)


def _is_only_quantized(node: Node, steps: Sequence[Node]) -> bool:
    """Whether an op is a ReLU that only quantizations of a run read."""
    if node.target is not torch.ops.aten.relu.default:
        return False
    return all(user in steps and _calls(user, TENSOR) for user in node.users)


def _graph_of(
    nodes: Sequence[Node], inputs: Sequence[Node], results: Sequence[Node]
) -> GraphModule:
    """Return ops as a graph of their own."""
    graph = Graph()
    copies = {node: graph.placeholder(f"input_{index}") for index, node in enumerate(inputs)}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda source: copies[source])
    graph.output(tuple(copies[node] for node in results))
    return GraphModule(nn.Module(), graph)
