"""Models that a runtime compiles as graphs with named tensors, and the base of their adaptors.

The metadata of a saved model is a JSON file next to the framework's own files.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signatures.input_spec import (
    InputSpec,
    make_synthetic_example,
    unused_capture_warning,
)
from neural_mp.adaptors.common.signatures.signature import (
    Array,
    Shape,
    Signature,
    parse_tensor_shape,
)
from neural_mp.adaptors.common.threads import ThreadLimit, get_allowed_threads, limit_op_threads
from neural_mp.adaptors.common.weights.grouped_weight import GroupedWeight
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.core.enums import Capture
from neural_mp.errors import ModelLoadError
from neural_mp.io.readers import read_json
from neural_mp.util.validators import Validator, mapping_of, string

T = TypeVar("T")

#: Common entries of converted graphs, whatever the framework.
CONVERTED: Mapping[str, Validator[Any]] = {
    "counts": ConversionCounts.from_dict,
    "ops": mapping_of(string),
}
#: Optional entries, absent from files of earlier versions.
LATER: Mapping[str, Validator[Any]] = {
    "results": mapping_of(OutputLocation.from_list),
    "example": mapping_of(parse_tensor_shape),
}
P = TypeVar("P")
G = TypeVar("G", bound="GraphModel[Any]")

#: Function: tensor → array → the outputs, in the order of the signature.
Run = Callable[[Mapping[str, Array]], list[Any]]


def collect_model_details(
    signature: Signature,
    example: Mapping[str, Array],
    ops: Mapping[str, str],
    results: Mapping[str, OutputLocation],
    counts: ConversionCounts,
) -> dict[str, Any]:
    """Return the signature and the entries of `CONVERTED` and `LATER` for JSON."""
    tensors = [port.tensor for port in signature.inputs if port.dtype is not None]
    return {
        **signature.to_dict(),
        "counts": vars(counts),
        "ops": dict(ops),
        "results": {op: result.to_list() for op, result in results.items()},
        # Sizes of the example inputs, not their values, which are the user's data.
        "example": {tensor: list(np.shape(example[tensor])) for tensor in tensors},
    }


def restore_example_inputs(signature: Signature, details: Mapping[str, Any]) -> dict[str, Array]:
    """Return synthetic inputs with the sizes of the example before saving, if stored."""
    shapes: Mapping[str, Shape] = details.get("example", {})
    inputs = (replace(port, shape=shapes.get(port.tensor, port.shape)) for port in signature.inputs)
    return make_synthetic_example(replace(signature, inputs=tuple(inputs)))


def write_details(file: Path, details: Mapping[str, Any]) -> None:
    """Write dicts, lists, strings and numbers as JSON."""
    file.write_text(json.dumps(details, indent=1), encoding="utf-8")


def read_details(file: Path, schema: Validator[T]) -> T:
    """Return the metadata in a file; raise `ModelLoadError` if missing or invalid."""
    return read_json(file, schema, ModelLoadError)


@dataclass(frozen=True, eq=False)
class GraphModel(ABC, Generic[P]):
    """A graph that a runtime compiles, generic in the type of graph.

    Attributes:
        program: the graph for planning: canonicalized, or converted.
        example: tensor → array, inputs for a run.
        given: the user's graph; None for a converted model.
        ops: for a converted model, node → the op of the unconverted graph that its time counts
            towards, if the names differ.
        results: for a converted model, op of the unconverted graph → location of its result; ops
            fused into others have none.
        warnings: notes to the user.
        grouped: op → weight in groups that the next conversion stores.
    """

    program: P
    signature: Signature
    example: dict[str, Array]
    given: P | None
    ops: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    grouped: Mapping[str, GroupedWeight] = field(default_factory=dict, repr=False)
    #: Number of threads, None without a request → the compiled graph.
    _runners: dict[int | None, Run] = field(default_factory=dict)

    @property
    def active_graph(self) -> P:
        """The graph to run: the user's own, unless converted."""
        return self.program if self.given is None else self.given

    @abstractmethod
    def compile_graph(self) -> Run:
        """Return the compiled graph to run, for the allowed number of threads."""

    def get_runner(self) -> Run:
        """Return the compiled graph, compiled if it was not yet for the number of threads."""
        requested = ThreadLimit.threads
        run = self._runners.get(requested)
        if run is None:
            # Without a request, the environment decides when the graph is compiled.
            threads = get_allowed_threads()
            run = self._runners.get(threads) or self.compile_graph()
            self._runners[threads] = self._runners[requested] = run
        return run

    def run(self, bound: Mapping[str, Array]) -> list[Any]:
        """Return the outputs for bound inputs, in the order of the signature."""
        return self.get_runner()(bound)


def with_weights(model: G, weights: Mapping[str, GroupedWeight]) -> G:
    """Return a model whose next conversion stores these weights, by op."""
    return replace(model, grouped=weights, _runners={})


def collect_graph_details(model: GraphModel[Any]) -> dict[str, Any]:
    """Return the metadata of a model for JSON."""
    details = collect_model_details(
        model.signature, model.example, model.ops, model.results, model.counts
    )
    return {**details, "converted": model.given is None}


class GraphAdaptor(Adaptor[G]):
    """An adaptor of a runtime that compiles graphs, from and to numpy arrays."""

    #: The name of the format in messages.
    title: ClassVar[str]

    threads = staticmethod(limit_op_threads)

    @abstractmethod
    def read_model(self, source: object, spec: InputSpec) -> G:
        """Read and canonicalize a model, as described in `Adaptor.load`."""

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> G:
        """Read and canonicalize a model. `inputs` are names, or example arrays."""
        spec = InputSpec.from_arguments(inputs, outputs, example).without_shapes(self.title)
        model = self.read_model(source, spec)
        return replace(
            model, warnings=(*model.warnings, *unused_capture_warning(self.title, capture))
        )

    def prepare(self, model: G) -> None:
        """Compile the graph."""
        model.get_runner()

    def predict(self, model: G, inputs: object) -> Any:
        """Return outputs as arrays."""
        return model.signature.pack_outputs(model.run(model.signature.bind_inputs(inputs)))

    def example_inputs(self, model: G, batch_size: int | None = None) -> Any:
        """Return a tuple in input order: the example of the data, or synthetic inputs."""
        return model.signature.in_order(model.example, batch_size)
