"""The representation of an OpenVINO model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signature import Array, Signature
from neural_mp.adaptors.common.threads import allowed_threads
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.openvino.fusion import GraphStructure, structure
from neural_mp.adaptors.openvino.graph_edit import name_of
from neural_mp.adaptors.openvino.runtime import Runners


@dataclass(frozen=True, eq=False)
class OpenVinoModel:
    """A graph that OpenVINO runs.

    Attributes:
        program: the `openvino.Model` for planning: canonicalized, or converted.
        signature: the inputs and outputs, in the order of `program`.
        example: name → array, inputs for a run.
        given: the user's graph; None for a converted model.
        ops: for a converted model, inserted node → the op that it was inserted for.
        results: for a converted model, op of the unconverted graph → location of its result.
        warnings: notes to the user.
        counts: the inserted conversions.
    """

    program: Any
    signature: Signature
    example: dict[str, Array]
    given: Any
    ops: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    _runners: dict[int | None, Runners] = field(default_factory=dict)

    @property
    def runs(self) -> Any:
        """The graph to run: the user's own, unless converted."""
        return self.program if self.given is None else self.given

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        return structure(self.program)

    @cached_property
    def _inputs(self) -> list[str]:
        return [name_of(port.get_node()) for port in self.runs.inputs]

    @cached_property
    def _outputs(self) -> list[int]:
        """The positions in the graph of the outputs of the signature."""
        there = [name_of(port.get_node()) for port in self.runs.outputs]
        return [there.index(tensor) for tensor in self.signature.output_tensors]

    def feeds(self, bound: Mapping[str, Array]) -> list[Array]:
        """Return bound inputs in the order of the graph."""
        return [bound[tensor] for tensor in self._inputs]

    def run(self, bound: Mapping[str, Array]) -> list[Array]:
        """Return the outputs, in the order of the signature."""
        threads = allowed_threads()
        if threads not in self._runners:
            self._runners[threads] = Runners(self.runs)
        feeds = self.feeds(bound)
        found = self._runners[threads].runner_for(feeds)(feeds)
        return [found[position] for position in self._outputs]
