"""The common part of adaptors of runtimes that compile graphs with named tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from neural_mp.adaptors.common.named_graphs.graph_model import GraphModel
from neural_mp.adaptors.common.signatures.input_spec import InputSpec, unused_capture
from neural_mp.adaptors.common.threads import limited_threads
from neural_mp.adaptors.contract import Adaptor
from neural_mp.core.enums import Capture

G = TypeVar("G", bound=GraphModel[Any])


class GraphAdaptor(Adaptor[G]):
    """An adaptor of a runtime that compiles graphs, from and to numpy arrays."""

    #: The name of the format in messages.
    title: ClassVar[str]

    threads = staticmethod(limited_threads)

    @abstractmethod
    def read(self, source: object, spec: InputSpec) -> G:
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
        spec = InputSpec.read(inputs, outputs, example).without_shapes(self.title)
        model = self.read(source, spec)
        return replace(model, warnings=(*model.warnings, *unused_capture(self.title, capture)))

    def prepare(self, model: G) -> None:
        """Compile the graph."""
        model.runner()

    def predict(self, model: G, inputs: Any) -> Any:
        """Return outputs as arrays."""
        return model.signature.packed(model.run(model.signature.bind(inputs)))

    def example_inputs(self, model: G, batch_size: int | None = None) -> Any:
        """Return a tuple in input order: the example of the data, or synthetic inputs."""
        return model.signature.in_order(model.example, batch_size)
