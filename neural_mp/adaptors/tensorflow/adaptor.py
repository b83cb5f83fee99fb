"""The TensorFlow adaptor. Its methods import TensorFlow, so naming the class costs nothing."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from neural_mp.adaptors.common.channel_scaling import Layer, LayerChange
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.amp import FourLists
from neural_mp.core.byte_products import ByteProducts, KernelKind
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import observable_tensors
from neural_mp.space import Capability, TuningSpace

if TYPE_CHECKING:
    from neural_mp.adaptors.tensorflow.model import TensorFlowModel

logger = logging.getLogger(__name__)

_SUFFIXES = (".pb", ".pbtxt", ".keras", ".h5", ".hdf5")
_SAVED_MODEL = ("saved_model.pb", "saved_model.pbtxt")
#: Where the classes come from that are, or lead to, a graph of TensorFlow's.
_PACKAGES = ("tensorflow", "keras", "tf_keras")
_CLASSES = (
    *("Layer", "Model", "Graph", "GraphDef", "ConcreteFunction", "GenericFunction"),
    *("Function", "AutoTrackable", "Module", "Trackable"),
)


class TensorFlowAdaptor(Adaptor):
    """Keras models, SavedModels, concrete functions, and frozen graphs."""

    framework = "tensorflow"
    file_suffixes: ClassVar[tuple[str, ...]] = (".pb", ".pbtxt")

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` is TensorFlow's or Keras's object, or a path that looks like a model."""
        if isinstance(source, str | Path):
            path = Path(source)
            return path.suffix in _SUFFIXES or any((path / name).is_file() for name in _SAVED_MODEL)
        return any(
            kind.__module__.split(".")[0] in _PACKAGES and kind.__name__ in _CLASSES
            for kind in type(source).__mro__
        )

    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: str = "whole",
    ) -> TensorFlowModel:
        """Freeze and prepare a model. `inputs` are names, or example arrays."""
        from neural_mp.adaptors.tensorflow.loading import load

        model = load(source, inputs, outputs, example)
        if capture == "whole":
            return model
        ignored = f"capture = {capture!r} is not used for TensorFlow: every model is one graph"
        return replace(model, warnings=(*model.warnings, ignored))

    def copied(self, model: TensorFlowModel) -> TensorFlowModel:
        """The graph alone: Keras numbers layers as they are made, and a copy is made anew."""
        return replace(model, original=None)

    def graph(self, model: TensorFlowModel) -> OpGraph:
        """Every op with its edges and fusion group."""
        from neural_mp.adaptors.tensorflow.graph import build_graph

        return build_graph(model)

    def capabilities(self, model: TensorFlowModel, hardware: Hardware) -> Mapping[str, Capability]:
        """From the runtime's kernel registry and mixed precision lists, and from trying kernels."""
        from neural_mp.adaptors.tensorflow.capabilities import capabilities

        return capabilities(model, hardware)

    def kernel_products(self, hardware: Hardware) -> Mapping[KernelKind, ByteProducts]:
        """See the contract: by trying the largest bytes."""
        from neural_mp.adaptors.common.kernel_products import products_for
        from neural_mp.adaptors.tensorflow.kernel_products import kernel_products

        return products_for(hardware, kernel_products)

    def wide_kernels(self, model: TensorFlowModel) -> frozenset[KernelKind]:
        """See the contract."""
        from neural_mp.adaptors.tensorflow.weight_range import wide_kernels

        return wide_kernels(model)

    def right_everywhere(self, model: TensorFlowModel) -> TensorFlowModel:
        """See the contract: the weights are rounded once more."""
        from neural_mp.adaptors.tensorflow.weight_range import with_reduced_weights

        return with_reduced_weights(model)

    def op_types(self) -> Collection[str]:
        """See the contract."""
        from neural_mp.adaptors.tensorflow.kernel_registry import every_op_type

        return every_op_type()

    def kinds(self) -> Mapping[str, Collection[str]]:
        """See the contract."""
        from neural_mp.adaptors.tensorflow.op_kinds import TYPES

        return TYPES

    def amp_lists(self, precision: Precision) -> FourLists:
        """See the contract: those of the TensorFlow that is installed."""
        from neural_mp.adaptors.tensorflow.runtime_lists import runtime_lists

        return runtime_lists(precision) or super().amp_lists(precision)

    def observe(
        self, model: TensorFlowModel, batches: Iterable[Any], space: TuningSpace
    ) -> Observations:
        """Ranges and noise of every tensor that may be quantized."""
        from neural_mp.adaptors.tensorflow.observe import observe

        tensors = observable_tensors(space.graph, space.int8_ops)
        return observe(model, (model.signature.bind(batch) for batch in batches), tensors)

    def convert(
        self,
        model: TensorFlowModel,
        plan: PrecisionPlan,
        observations: Observations,
        space: TuningSpace,
    ) -> TensorFlowModel:
        """Integer kernels, 16-bit types, and conversions where they meet."""
        from neural_mp.adaptors.common.quantized_ranges import quantized_ranges
        from neural_mp.adaptors.common.repair import repaired
        from neural_mp.adaptors.tensorflow.write import convert

        resolved = space.resolve(plan)
        model, observations = repaired(self, model, resolved, observations, space)
        flow = space.flow(resolved)
        ranges = quantized_ranges(space.graph, flow, resolved, observations)
        written = convert(model, flow, ranges, resolved)
        return replace(
            model, graph=written.graph, ops=written.ops, counts=written.counts, original=None
        )

    def layers(self, model: TensorFlowModel) -> Mapping[str, Layer]:
        """Convolutions, products with constant matrices, normalizations."""
        from neural_mp.adaptors.tensorflow.layer_constants import layers

        return layers(model)

    def with_layers(
        self, model: TensorFlowModel, changes: Mapping[str, LayerChange]
    ) -> TensorFlowModel:
        """See the contract."""
        from neural_mp.adaptors.tensorflow.layer_constants import with_layers

        return with_layers(model, changes)

    def channel_keepers(self, model: TensorFlowModel) -> Collection[str]:
        """Reshapings that leave the last axis as it is."""
        from neural_mp.adaptors.tensorflow.layer_constants import channel_keepers

        return channel_keepers(model)

    def hessian_traces(
        self, model: TensorFlowModel, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """By gradients of the graph."""
        from neural_mp.adaptors.tensorflow.gradients import hessian_traces

        return hessian_traces(model, (model.signature.bind(batch) for batch in batches), ops)

    def predict(self, model: TensorFlowModel, inputs: Any) -> Any:
        """Outputs as arrays, or as tensors where the inputs were tensors."""
        import tensorflow as tf

        from neural_mp.core.nested import leaves

        results = model.run(model.signature.bind(inputs))
        if any(tf.is_tensor(leaf) for leaf in leaves(inputs)):
            results = [tf.convert_to_tensor(result) for result in results]
        return model.signature.packed(results)

    def example_inputs(self, model: TensorFlowModel, batch_size: int | None = None) -> Any:
        """A tuple in the order of the inputs: the example of the data, else made up."""
        return model.signature.in_order(model.example, batch_size)

    def native(self, model: TensorFlowModel) -> Any:
        """The user's own Keras model for an untouched one, else a `ConvertedModel`."""
        from neural_mp.adaptors.tensorflow.converted import ConvertedModel

        return model.original if model.original is not None else ConvertedModel(model)

    def profile(self, model: TensorFlowModel, inputs: Any) -> Mapping[str, float]:
        """Seconds of every op that runs, by name; ops that run along with another are in it."""
        from neural_mp.adaptors.tensorflow.profile import profile

        return profile(model, model.signature.bind(inputs))

    def conversion_counts(self, model: TensorFlowModel) -> ConversionCounts:
        """Of those that were put in; a model's own casts are not counted."""
        return model.counts

    def size(self, model: TensorFlowModel) -> int:
        """Bytes of the constants."""
        from neural_mp.adaptors.tensorflow.nodes import constant_bytes

        return sum(map(constant_bytes, model.graph.nodes.values()))

    def fingerprint(self, model: TensorFlowModel) -> str:
        """Of all nodes in order, weights included."""
        digest = hashlib.sha256()
        for node in model.graph.nodes.values():
            digest.update(node.SerializeToString(deterministic=True))
        return digest.hexdigest()

    def first_non_finite(self, model: TensorFlowModel, inputs: Any) -> str | None:
        """The first op whose result holds NaN or Inf."""
        from neural_mp.adaptors.tensorflow.observe import first_non_finite

        return first_non_finite(model, model.signature.bind(inputs))

    def save(self, model: TensorFlowModel, path: Path) -> None:
        """A SavedModel."""
        from neural_mp.adaptors.tensorflow import storage

        storage.save(model, path)

    def save_file(self, model: TensorFlowModel, path: Path, metadata: Mapping[str, str]) -> None:
        """A frozen graph, as `.pb` or `.pbtxt`, which has no room for metadata."""
        from neural_mp.adaptors.tensorflow import graph_files

        graph_files.write(model.graph.to_graph_def(), path)

    def draw(self, model: TensorFlowModel, path: Path) -> tuple[Path, ...]:
        """Frozen graphs, `.pb` and `.pbtxt`."""
        from neural_mp.adaptors.tensorflow.graph_files import draw

        return draw(model.graph.to_graph_def(), path)

    def restore(self, path: Path) -> TensorFlowModel:
        """Load the SavedModel's graph."""
        from neural_mp.adaptors.tensorflow import storage

        return storage.restore(path)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """TensorFlow fixes its threads when it first runs; asking for others later is in vain."""
        if count is not None:
            import tensorflow as tf

            try:
                tf.config.threading.set_intra_op_parallelism_threads(count)
            except RuntimeError:
                if tf.config.threading.get_intra_op_parallelism_threads() != count:
                    logger.warning(
                        "TensorFlow keeps the number of threads it started with; to use %d, set "
                        "tf.config.threading.set_intra_op_parallelism_threads before anything runs",
                        count,
                    )
        yield
