"""The TensorFlow adaptor."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.calibration import TensorSummary
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.cross_layer_scaling import Layer, LayerChange
from neural_mp.adaptors.common.input_spec import GivenInputs, unused_capture
from neural_mp.adaptors.common.int8_accumulation import Products
from neural_mp.adaptors.common.op_outputs import OpValue
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.adaptors.tensorflow import (
    capabilities,
    graph_files,
    hessian,
    layer_params,
    loading,
    observe,
    reduce_range,
    storage,
)
from neural_mp.adaptors.tensorflow.amp_pass import runtime_lists
from neural_mp.adaptors.tensorflow.convert import write
from neural_mp.adaptors.tensorflow.converted_module import ConvertedModel
from neural_mp.adaptors.tensorflow.graph import build_graph
from neural_mp.adaptors.tensorflow.int8_accumulation import kernel_products
from neural_mp.adaptors.tensorflow.kernel_registry import every_op_type
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.op_types import TYPES
from neural_mp.adaptors.tensorflow.profiler import time_ops, trace
from neural_mp.adaptors.tensorflow.tensor_graph import constant_bytes
from neural_mp.amp import FourLists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.kernel_trace import Executed
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import leaves

logger = logging.getLogger(__name__)


class TensorFlowAdaptor(Adaptor[TensorFlowModel]):
    """Keras models, SavedModels, concrete functions, and frozen graphs."""

    framework = "tensorflow"
    packages = ("tensorflow", "keras")
    file_suffixes: ClassVar[tuple[str, ...]] = graph_files.SUFFIXES
    frees_axes = True

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> TensorFlowModel:
        """Freeze and prepare a model. `inputs` are names, example arrays, or shapes."""
        model = loading.load(source, GivenInputs.read(inputs, outputs, example))
        return replace(model, warnings=(*model.warnings, *unused_capture("TensorFlow", capture)))

    def copied(self, model: TensorFlowModel) -> TensorFlowModel:
        """The graph alone: Keras numbers layers as they are made, and a copy is made anew."""
        return replace(model, original=None)

    def graph(self, model: TensorFlowModel) -> OpGraph:
        """Every op with its edges and fusion group."""
        return build_graph(model)

    def kernels(
        self, model: TensorFlowModel, hardware: Hardware, products: Products
    ) -> Mapping[str, OpKernels]:
        """From the runtime's kernel registry and mixed precision lists, and from trying kernels."""
        return capabilities.kernels(model, products)

    def kernel_products(self, hardware: Hardware) -> Products:
        """By trying the largest bytes."""
        return kernel_products(hardware)

    def wide_kernels(self, model: TensorFlowModel) -> frozenset[KernelKind]:
        """The kinds of kernel whose weights go beyond ±63."""
        return reduce_range.wide_kernels(model)

    def right_everywhere(self, model: TensorFlowModel) -> TensorFlowModel:
        """The model with its weights rounded once more."""
        return reduce_range.with_reduced_weights(model)

    def op_types(self) -> Collection[str]:
        """Every op type that has a definition or a kernel."""
        return every_op_type()

    def kinds(self) -> Mapping[str, Collection[str]]:
        """Kind of op → TensorFlow's op types."""
        return TYPES

    def amp_lists(self, precision: Precision) -> FourLists:
        """The lists of the TensorFlow that is installed; those of all frameworks by default."""
        return runtime_lists(precision) or super().amp_lists(precision)

    def watch(
        self, model: TensorFlowModel, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, TensorSummary]]:
        """Every tensor is reduced within the graph, by the runtime."""
        return observe.watch(model, map(model.signature.bind, batches), tensors)

    def results(self, model: TensorFlowModel) -> OpGraph:
        """Of a converted model as it was written."""
        return observe.results(model)

    def values(
        self, model: TensorFlowModel, ops: Collection[str]
    ) -> Callable[[Any], Mapping[str, OpValue]]:
        """They are fetched, in one run."""
        run = observe.values(model, ops)
        return lambda inputs: run(model.signature.bind(inputs))

    def write(
        self, model: TensorFlowModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
    ) -> TensorFlowModel:
        """Integer kernels, 16-bit types, and conversions where they meet."""
        return write(model, plan, ranges)

    def layers(self, model: TensorFlowModel) -> Mapping[str, Layer]:
        """Convolutions, products with constant matrices, normalizations."""
        return layer_params.layers(model)

    def with_layers(
        self, model: TensorFlowModel, changes: Mapping[str, LayerChange]
    ) -> TensorFlowModel:
        """The model with other constants in some of its layers."""
        return layer_params.with_layers(model, changes)

    def channel_keepers(self, model: TensorFlowModel) -> Collection[str]:
        """Reshapings that leave the last axis as it is."""
        return layer_params.channel_keepers(model)

    def hessian_traces(
        self, model: TensorFlowModel, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """By gradients of the graph."""
        return hessian.hessian_traces(model, map(model.signature.bind, batches), ops)

    def predict(self, model: TensorFlowModel, inputs: object) -> Any:
        """Outputs as arrays, or as tensors where the inputs were tensors."""
        results = model.run(model.signature.bind(inputs))
        # To ask TensorFlow of an array takes as long as to run a small graph.
        if any(type(leaf) is not np.ndarray and tf.is_tensor(leaf) for leaf in leaves(inputs)):
            results = [tf.convert_to_tensor(result) for result in results]
        return model.signature.packed(results)

    def example_inputs(self, model: TensorFlowModel, batch_size: int | None = None) -> Any:
        """A tuple in the order of the inputs: the example of the data, else made up."""
        return model.signature.in_order(model.example, batch_size)

    def native(self, model: TensorFlowModel) -> Any:
        """The user's own Keras model for an untouched one, else a `ConvertedModel`."""
        return model.original if model.original is not None else ConvertedModel(model)

    def time_ops(self, model: TensorFlowModel, inputs: object, runs: int) -> dict[str, list[float]]:
        """By the runtime's own step statistics."""
        return time_ops(model, model.signature.bind(inputs), runs)

    def trace(self, model: TensorFlowModel, inputs: object) -> Mapping[str, Executed]:
        """By the runtime's own step statistics."""
        return trace(model, model.signature.bind(inputs))

    def conversion_counts(self, model: TensorFlowModel) -> ConversionCounts:
        """Of those that were put in; a model's own casts are not counted."""
        return model.counts

    def size(self, model: TensorFlowModel) -> int:
        """Bytes of the constants."""
        return sum(map(constant_bytes, model.graph.nodes.values()))

    def fingerprint(self, model: TensorFlowModel) -> str:
        """Of all nodes in order, weights included."""
        digest = hashlib.sha256()
        for node in model.graph.nodes.values():
            digest.update(node.SerializeToString(deterministic=True))
        return digest.hexdigest()

    def first_non_finite(self, model: TensorFlowModel, inputs: object) -> str | None:
        """The first op whose result holds NaN or Inf."""
        return observe.first_non_finite(model, model.signature.bind(inputs))

    def save(self, model: TensorFlowModel, path: Path) -> None:
        """A SavedModel."""
        storage.save(model, path)

    def save_file(self, model: TensorFlowModel, path: Path, metadata: Mapping[str, str]) -> None:
        """A frozen graph, as `.pb` or `.pbtxt`, which has no room for metadata."""
        graph_files.write(model.graph.to_graph_def(), path)

    def draw(self, model: TensorFlowModel, path: Path) -> tuple[Path, ...]:
        """Frozen graphs, `.pb` and `.pbtxt`."""
        return graph_files.draw(model.graph.to_graph_def(), path)

    def restore(self, path: Path) -> TensorFlowModel:
        """Load the SavedModel's graph."""
        return storage.restore(path)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """TensorFlow fixes its threads when it first runs; asking for others later is in vain."""
        if count is not None:
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
