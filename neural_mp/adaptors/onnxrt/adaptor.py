"""The ONNX Runtime adaptor."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import onnx

from neural_mp.adaptors.common.calibration import TensorSummary
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.cross_layer_scaling import Layer, LayerChange
from neural_mp.adaptors.common.input_spec import GivenInputs, unused_capture
from neural_mp.adaptors.common.int8_accumulation import Products
from neural_mp.adaptors.common.op_outputs import OpValue
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.adaptors.onnxrt import layer_params, loading, observe, reduce_range, storage
from neural_mp.adaptors.onnxrt.capabilities import kernels
from neural_mp.adaptors.onnxrt.convert import write
from neural_mp.adaptors.onnxrt.graph import build_graph
from neural_mp.adaptors.onnxrt.graph_edit import tensor_bytes, tensors_in
from neural_mp.adaptors.onnxrt.int8_accumulation import kernel_products
from neural_mp.adaptors.onnxrt.kernel_registry import every_op_type
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.op_types import TYPES
from neural_mp.adaptors.onnxrt.profiler import time_ops, trace
from neural_mp.adaptors.onnxrt.sessions import CPU
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import ByteProducts, KernelKind
from neural_mp.core.kernel_trace import Executed
from neural_mp.core.observations import Range
from neural_mp.space import ResolvedPlan

#: Where a user names the execution provider that the model will run on.
PROVIDER_VARIABLE = "NEURAL_MP_ONNX_PROVIDER"


class OnnxRuntimeAdaptor(Adaptor[OnnxModel]):
    """ONNX files, messages and their bytes.

    Args:
        provider: the execution provider, as ONNX Runtime calls it; by default what
            `NEURAL_MP_ONNX_PROVIDER` says, else the CPU's.
    """

    framework = "onnxrt"
    packages = ("onnxruntime", "onnx")
    file_suffixes: ClassVar[tuple[str, ...]] = (".onnx",)

    def __init__(self, provider: str | None = None) -> None:
        self.provider = provider or os.environ.get(PROVIDER_VARIABLE) or CPU
        self._threads: int | None = None

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> OnnxModel:
        """Read and prepare a model. `inputs` are names, or example arrays."""
        wanted = GivenInputs.read(inputs, outputs, example).without_shapes("ONNX")
        model = loading.load(source, wanted, self.provider)
        return replace(model, warnings=(*model.warnings, *unused_capture("ONNX", capture)))

    def graph(self, model: OnnxModel) -> OpGraph:
        """Every node; further results of a node as ops behind it."""
        return build_graph(model)

    def kernels(
        self, model: OnnxModel, hardware: Hardware, products: Products
    ) -> Mapping[str, OpKernels]:
        """From the kernel registry of the execution provider, and from ONNX's schemas."""
        if model.provider != CPU:  # what is tried are the CPU's kernels
            products = dict.fromkeys(KernelKind, ByteProducts.EXACT)
        return kernels(model, products)

    def kernel_products(self, hardware: Hardware) -> Products:
        """By trying the largest bytes."""
        return kernel_products(hardware)

    def wide_kernels(self, model: OnnxModel) -> frozenset[KernelKind]:
        """Of integer kernels, and of ops that ONNX Runtime makes some of."""
        return reduce_range.wide_kernels(model)

    def right_everywhere(self, model: OnnxModel) -> OnnxModel:
        """The same weights, unsigned."""
        return reduce_range.with_unsigned_weights(model)

    def op_types(self) -> Collection[str]:
        """Those of ONNX, and of ONNX Runtime's own."""
        return every_op_type(self.provider)

    def kinds(self) -> Mapping[str, Collection[str]]:
        """Kind of op → ONNX's op types."""
        return TYPES

    def watch(
        self, model: OnnxModel, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, TensorSummary]]:
        """What every part of a batch held: the tensors are fetched, and reduced at once."""
        bound = (model.signature.bind(batch) for batch in batches)
        return observe.watch(model, bound, tensors, self._threads)

    def results(self, model: OnnxModel) -> OpGraph:
        """Of a converted model as it was written."""
        return observe.results(model)

    def values(
        self, model: OnnxModel, ops: Collection[str]
    ) -> Callable[[Any], Mapping[str, OpValue]]:
        """They are fetched, in one run."""
        run = observe.values(model, ops, self._threads)
        return lambda inputs: run(model.signature.bind(inputs))

    def write(self, model: OnnxModel, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> OnnxModel:
        """Integer kernels, 16-bit types, and conversions where they meet."""
        return write(model, plan, ranges)

    def layers(self, model: OnnxModel) -> Mapping[str, Layer]:
        """Convolutions, products with constant matrices, layer norms."""
        return layer_params.layers(model.structure)

    def with_layers(self, model: OnnxModel, changes: Mapping[str, LayerChange]) -> OnnxModel:
        """A copy of the graph with further constants."""
        return layer_params.with_layers(model, changes)

    def predict(self, model: OnnxModel, inputs: object) -> Any:
        """Outputs as arrays."""
        results = model.run(model.signature.bind(inputs), self._threads)
        return model.signature.packed(results)

    def example_inputs(self, model: OnnxModel, batch_size: int | None = None) -> Any:
        """A tuple in the order of the inputs: the example of the data, else made up."""
        return model.signature.in_order(model.example, batch_size)

    def native(self, model: OnnxModel) -> onnx.ModelProto:
        """The message, with its weights in it."""
        return storage.whole(model)

    def time_ops(
        self, model: OnnxModel, inputs: object, runs: int
    ) -> Mapping[str, Sequence[float]]:
        """By ONNX Runtime's own profiler."""
        return time_ops(model, model.signature.bind(inputs), runs, self._threads)

    def trace(self, model: OnnxModel, inputs: object) -> Mapping[str, Executed]:
        """By ONNX Runtime's own profiler."""
        return trace(model, model.signature.bind(inputs), self._threads)

    def conversion_counts(self, model: OnnxModel) -> ConversionCounts:
        """Of those that were put in; a model's own are not counted."""
        return model.counts

    def size(self, model: OnnxModel) -> int:
        """Bytes of the constants."""
        return sum(map(tensor_bytes, tensors_in(model.runs)))

    def fingerprint(self, model: OnnxModel) -> str:
        """Of all nodes in order, weights included."""
        return storage.digest(model.runs)

    def first_non_finite(self, model: OnnxModel, inputs: object) -> str | None:
        """The first op whose result holds NaN or Inf."""
        return observe.first_non_finite(model, model.signature.bind(inputs))

    def save(self, model: OnnxModel, path: Path) -> None:
        """An `.onnx` file, and what is needed to take it up again."""
        storage.save(model, path)

    def save_file(self, model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
        """An `.onnx` file; of more than 2 GB, with its weights in a second file beside it."""
        storage.save_file(model, path, metadata)

    def export_onnx(self, model: OnnxModel, path: Path, metadata: Mapping[str, str]) -> None:
        """The same as `save_file`: it is ONNX already."""
        storage.save_file(model, path, metadata)

    def draw(self, model: OnnxModel, path: Path) -> tuple[Path, ...]:
        """`.onnx` and `.pbtxt`."""
        return storage.draw(model, path)

    def restore(self, path: Path) -> OnnxModel:
        """Read back what `save` wrote."""
        return storage.restore(path, self.provider)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """Sessions have the number of threads they were made with; others are made for others."""
        before, self._threads = self._threads, count
        try:
            yield
        finally:
            self._threads = before
