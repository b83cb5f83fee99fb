"""The representation of an OpenVINO model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from neural_mp.adaptors.common.named_graphs.graph_model import GraphModel, Run
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.openvino.fusion import GraphStructure, structure
from neural_mp.adaptors.openvino.graph_edit import name_of, rename
from neural_mp.adaptors.openvino.kernel_check import rejected_ops
from neural_mp.adaptors.openvino.runtime import ShapedRunner, from_bytes, to_bytes


@dataclass(frozen=True, eq=False)
class OpenVinoModel(GraphModel[Any]):
    """An `openvino.Model` that OpenVINO runs, with the signature in the order of the data.

    Attributes:
        streams: concurrent calls that the model is compiled for; None for one at a time.
    """

    streams: int | None = None

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        return structure(self.program, self.rejected)

    @cached_property
    def rejected(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run next to integer kernels; empty once converted."""
        return {} if self.given is None else rejected_ops(self.program)

    @cached_property
    def _inputs(self) -> list[str]:
        return [name_of(port.get_node()) for port in self.runs.inputs]

    @cached_property
    def _outputs(self) -> list[int]:
        """The positions in the graph of the outputs of the signature."""
        names = [name_of(port.get_node()) for port in self.runs.outputs]
        return [names.index(tensor) for tensor in self.signature.output_tensors]

    def in_order(self, outputs: Sequence[Array]) -> list[Array]:
        """Return outputs of the graph in the order of the signature."""
        return [outputs[position] for position in self._outputs]

    def feeds(self, bound: Mapping[str, Array]) -> list[Array]:
        """Return bound inputs in the order of the graph."""
        return [bound[tensor] for tensor in self._inputs]

    def compiled(self) -> Run:
        """Return the compiled graph to run, for the allowed number of threads."""
        inputs = self._inputs
        example = tuple(np.shape(self.example[tensor]) for tensor in inputs)
        is_converted = self.given is None
        runner = ShapedRunner(self.runs, example, streams=self.streams, rounds=not is_converted)

        def run_bound(bound: Mapping[str, Array]) -> list[Array]:
            return self.in_order(runner([bound[tensor] for tensor in inputs]))

        return run_bound

    def __reduce__(self) -> tuple[Callable[..., OpenVinoModel], tuple[Any, ...]]:
        """Return the parts for pickling: graphs as the contents of their files."""
        rest = {field.name: getattr(self, field.name) for field in fields(self)}
        original = rest.pop("given")
        contents = [to_bytes(rest.pop("program"))]
        if original is not None and original is not self.program:
            contents.append(to_bytes(original))
        return _unpickle_model, (contents, original is None, {**rest, "_runners": {}})


def with_streams(model: OpenVinoModel, count: int) -> OpenVinoModel:
    """Return a model compiled for concurrent calls."""
    return replace(model, streams=count, _runners={})


def renamed(model: OpenVinoModel, names: Mapping[str, str]) -> OpenVinoModel:
    """Return a loaded model with new names of ops, and of what is named after these."""
    program = model.program.clone()
    rename(program, names)
    return replace(model, program=program, given=program, _runners={})


def _unpickle_model(
    contents: list[tuple[bytes, bytes]], converted: bool, rest: dict[str, Any]
) -> OpenVinoModel:
    graphs = [from_bytes(*content) for content in contents]
    return OpenVinoModel(graphs[0], given=None if converted else graphs[-1], **rest)
