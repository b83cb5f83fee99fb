"""A graph in stages that run in turn, so that what lies before a change is computed only once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import is_tensor
from neural_mp.adaptors.onnxrt.graph.subgraphs import iterate_node_bodies

#: Nodes before or behind an even cut among which the cut with the fewest values is chosen, as a
#: fraction of those of a stage.
_WINDOW_RATIO = 0.25

#: Feeds of a run, names of outputs → arrays.
Run = Callable[[Mapping[str, Array]], list[Array]]


@dataclass(frozen=True)
class Stage:
    """Consecutive ops of a graph.

    Attributes:
        program: the ops.
        inputs: the values that they read, of the graph's inputs and of earlier stages.
        outputs: the values that later stages read, and outputs of the graph.
    """

    program: ir.Model
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


@dataclass(frozen=True)
class PreparedStage:
    """A stage with the means to run it.

    Attributes:
        stage: the stage.
        run: its run.
        run_fixed: the run of `fix_inputs`, which computes the same faster as long as none of these
            inputs is changed.
    """

    stage: Stage
    run: Run
    run_fixed: Run


@dataclass
class StagedRun:
    """Runs a graph on some inputs, and from the first stage on that a changed input concerns.

    Attributes:
        stages: the stages in order.
        outputs: the names of the outputs.
        feeds: the inputs by name.
    """

    stages: Sequence[PreparedStage]
    outputs: Sequence[str]
    feeds: Mapping[str, Array]

    @cached_property
    def _values(self) -> dict[str, Array]:
        """The inputs, and what all stages compute from them."""
        return self._run_from(0, {}, self.feeds)

    def run(self, changes: Mapping[str, Array]) -> list[Array]:
        """Return the outputs with some inputs changed."""
        concerned = (
            position
            for position, prepared in enumerate(self.stages)
            if changes.keys() & prepared.stage.inputs
        )
        values = self._run_from(next(concerned, len(self.stages)), changes, self._values)
        return [values[name] for name in self.outputs]

    def _run_from(
        self, first: int, changes: Mapping[str, Array], computed: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Return all values, those before the first stage as computed."""
        values = {**computed, **changes}
        for prepared in self.stages[first:]:
            stage = prepared.stage
            run = prepared.run if changes.keys() & stage.inputs else prepared.run_fixed
            results = run({name: values[name] for name in stage.inputs})
            values.update(zip(stage.outputs, results, strict=True))
        return values


def fix_inputs(program: ir.Model, arrays: Mapping[str, Array]) -> ir.Model:
    """Return a copy of a graph with some of its inputs as constants; other names are ignored."""
    fixed = program.clone()
    for value in list(fixed.graph.inputs):
        array = arrays.get(str(value.name))
        if array is not None:
            value.const_value = ir.Tensor(array, name=value.name)
            fixed.graph.inputs.remove(value)
            fixed.graph.register_initializer(value)
    return fixed


def split_graph(program: ir.Model, count: int) -> list[Stage]:
    """Return a graph in stages of about as many ops each, `count` at most.

    Args:
        program: the graph, with types; values of unknown type, and lists, pass no cut.
        count: the number of stages.
    """
    graph = program.graph
    nodes = list(graph)
    producers, last_readers = dict[ir.Value, int](), dict[ir.Value, int]()
    for position, node in enumerate(nodes):
        producers.update(dict.fromkeys(node.outputs, position))
        last_readers.update(dict.fromkeys(_iterate_read_values(node, graph), position))
    crossing = [list[ir.Value]() for _ in range(len(nodes) + 1)]
    for value, position in producers.items():
        for cut in range(position + 1, last_readers.get(value, position) + 1):
            crossing[cut].append(value)
    bounds = [0, *_choose_cuts(crossing, count), len(nodes)]
    stages = (
        _extract_stage(program, nodes[start:end], producers, last_readers, end)
        for start, end in itertools.pairwise(bounds)
    )
    return [stage for stage in stages if stage is not None]


def _iterate_read_values(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values of a graph that a node or its bodies read."""
    yield from (value for value in node.inputs if value is not None and value.graph is graph)
    for body in iterate_node_bodies(node):
        yield from (value for value in body.outputs if value.graph is graph)
        for inner in body:
            yield from _iterate_read_values(inner, graph)


def _choose_cuts(crossing: Sequence[Sequence[ir.Value]], count: int) -> list[int]:
    """Return positions near even ones, each where the fewest values cross."""
    size = (len(crossing) - 1) / count
    cuts = list[int]()
    for number in range(1, count):
        window = range(
            max(1, round((number - _WINDOW_RATIO) * size)),
            min(len(crossing) - 1, round((number + _WINDOW_RATIO) * size) + 1),
        )
        fitting = [cut for cut in window if crossing[cut] and all(map(_is_passed, crossing[cut]))]
        if fitting:
            cuts.append(min(fitting, key=lambda cut: (len(crossing[cut]), cut)))
    return sorted(set(cuts))


def _is_passed(value: ir.Value) -> bool:
    return is_tensor(value) and value.dtype is not None


def _extract_stage(
    program: ir.Model,
    nodes: Sequence[ir.Node],
    producers: Mapping[ir.Value, int],
    last_readers: Mapping[ir.Value, int],
    end: int,
) -> Stage | None:
    """Return the ops as a stage; None if nothing reads their results."""
    graph = program.graph
    results = dict.fromkeys(value for node in nodes for value in node.outputs)
    read = dict.fromkeys(value for node in nodes for value in _iterate_read_values(node, graph))
    inputs = [v for v in read if v not in results and (v in producers or v.const_value is None)]
    outputs = [v for v in results if last_readers.get(v, -1) >= end or v.is_graph_output()]
    if end == len(graph):
        outputs += [v for v in graph.outputs if v.producer() is None and not v.is_graph_input()]
    if not outputs:
        return None
    part = ir.convenience.extract(graph, inputs, outputs)
    for value, source in zip(part.inputs, inputs, strict=True):
        if source in producers and value.shape is not None:
            value.shape = ir.Shape([None] * len(value.shape))  # sizes of the example, perhaps
    functions = list(program.functions.values())
    return Stage(
        ir.Model(part, ir_version=program.ir_version, functions=functions),
        tuple(str(value.name) for value in inputs),
        tuple(str(value.name) for value in outputs),
    )
