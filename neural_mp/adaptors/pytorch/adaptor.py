"""The PyTorch adaptor."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from neural_mp.adaptors.common.calibration import TensorSummary
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.cross_layer_scaling import Layer, LayerChange
from neural_mp.adaptors.common.input_spec import GivenInputs
from neural_mp.adaptors.common.int8_accumulation import Products
from neural_mp.adaptors.common.op_outputs import OpValue
from neural_mp.adaptors.contract import Adaptor, ConversionCounts
from neural_mp.adaptors.pytorch import (
    capabilities,
    hessian,
    kernel_ops,
    layer_params,
    loading,
    observe,
    onnx_export,
    profiler,
    qdq_ops,
    reduce_range,
    storage,
)
from neural_mp.adaptors.pytorch.call_signature import resized
from neural_mp.adaptors.pytorch.casts import CAST
from neural_mp.adaptors.pytorch.convert import write
from neural_mp.adaptors.pytorch.converted_module import CompiledModule, as_module
from neural_mp.adaptors.pytorch.direct_calls import DirectCalls
from neural_mp.adaptors.pytorch.graph import build_graph
from neural_mp.adaptors.pytorch.int8_accumulation import kernel_products
from neural_mp.adaptors.pytorch.model import OP_NAME, TorchModel, fingerprint
from neural_mp.adaptors.pytorch.op_types import TYPES, every_op_type
from neural_mp.adaptors.pytorch.profiler import trace
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.kernel_trace import Executed
from neural_mp.core.observations import Range
from neural_mp.space import ResolvedPlan


class PyTorchAdaptor(Adaptor[TorchModel]):
    """`nn.Module`, `torch.export` programs and their `.pt2` files."""

    framework = "pytorch"
    packages = ("torch",)

    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: Capture = Capture.WHOLE,
    ) -> TorchModel:
        """Capture a module, or take in an exported program. `inputs` may hold example tensors."""
        given = GivenInputs.read(inputs, None, example).without_shapes("PyTorch")
        with torch.no_grad():
            model = loading.load(source, given, capture)
        if outputs is None:
            return model
        ignored = "outputs is not used for PyTorch: a module returns what its forward returns"
        return replace(model, warnings=(*model.warnings, ignored))

    def graph(self, model: TorchModel) -> OpGraph:
        """Every op with its edges and fusion group."""
        return build_graph({path: part.portable for path, part in model.parts.items()})

    def kernels(
        self, model: TorchModel, hardware: Hardware, products: Products
    ) -> Mapping[str, OpKernels]:
        """In 16 bits found by running every kind of call once."""
        return capabilities.kernels(model, hardware, products)

    def kernel_products(self, hardware: Hardware) -> Products:
        """By trying the largest bytes."""
        return kernel_products(hardware)

    def wide_kernels(self, model: TorchModel) -> frozenset[KernelKind]:
        """Of the layers that read integers, in their portable form."""
        return reduce_range.wide_kernels(model)

    def right_everywhere(self, model: TorchModel) -> TorchModel:
        """The weights are rounded once more."""
        return reduce_range.with_reduced_weights(model)

    def op_types(self) -> Collection[str]:
        """By torch's dispatcher."""
        return every_op_type()

    def kinds(self) -> Mapping[str, Collection[str]]:
        """By the names of captured ops."""
        return TYPES

    def watch(
        self, model: TorchModel, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, TensorSummary]]:
        """The portable graphs run op by op."""
        return observe.watch(model, map(model.call, batches), tensors)

    def results(self, model: TorchModel) -> OpGraph:
        """Of the graphs that are run."""
        return observe.results(model)

    def values(
        self, model: TorchModel, ops: Collection[str]
    ) -> Callable[[Any], Mapping[str, OpValue]]:
        """The runnable graphs run op by op."""
        run = observe.values(model, ops)
        return lambda inputs: run(model.call(inputs))

    def write(
        self, model: TorchModel, plan: ResolvedPlan, ranges: Mapping[str, Range]
    ) -> TorchModel:
        """16-bit ops by casts, INT8 ops by quantize/dequantize pairs, then integer kernels."""
        return write(model, plan, ranges)

    def layers(self, model: TorchModel) -> Mapping[str, Layer]:
        """Convolutions, dense layers, layer norms."""
        return layer_params.layers(model)

    def with_layers(self, model: TorchModel, changes: Mapping[str, LayerChange]) -> TorchModel:
        """The new constants are buffers of the graph."""
        return layer_params.with_layers(model, changes)

    def hessian_traces(
        self, model: TorchModel, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """By gradients of the captured graph."""
        return hessian.hessian_traces(model, map(model.call, batches), ops)

    def predict(self, model: TorchModel, inputs: Any) -> Any:
        """Outputs as tensors, or as arrays where the inputs were arrays."""
        return model.once(DirectCalls)(inputs)

    def example_inputs(self, model: TorchModel, batch_size: int | None = None) -> Any:
        """The captured example: a tuple of positional inputs, or a dict where there are none."""
        call = model.example if batch_size is None else resized(model.example, batch_size)
        return dict(call.kwargs) if call.kwargs and not call.args else call.args

    def native(self, model: TorchModel) -> Any:
        """The user's own module for an untouched model, else a `ConvertedModule`."""
        return model.original if model.original is not None else model.once(as_module)

    def compiled(self, model: TorchModel) -> Any:
        """A `CompiledModule`."""
        return model.built(lambda part: CompiledModule(part.portable))

    def export_onnx(self, model: TorchModel, path: Path, metadata: Mapping[str, str]) -> None:
        """By torch's own exporter; INT8 as QuantizeLinear and DequantizeLinear."""
        onnx_export.export_onnx(model, path, metadata)

    def time_ops(self, model: TorchModel, inputs: Any, runs: int) -> Mapping[str, list[float]]:
        """The runnable graphs run op by op."""
        return profiler.time_ops(model, model.call(inputs), runs)

    def trace(self, model: TorchModel, inputs: Any) -> Mapping[str, Executed]:
        """By torch's own profiler, the runnable graphs run op by op."""
        return trace(model, model.call(inputs))

    def conversion_counts(self, model: TorchModel) -> ConversionCounts:
        """Of the graph that is run."""
        # A cast of the user's own bears a name; ours do not.
        ours = [
            node.target
            for part in model.parts.values()
            for node in part.runnable.graph.nodes
            if OP_NAME not in node.meta
        ]
        return ConversionCounts(
            ours.count(CAST),
            ours.count(kernel_ops.quantize_uint8) + ours.count(qdq_ops.quantize_dynamic),
            ours.count(kernel_ops.dequantize_uint8),
        )

    def size(self, model: TorchModel) -> int:
        """Bytes of parameters and buffers in the portable form."""
        tensors = {id(tensor): tensor for tensor in model.weights.values()}
        return sum(tensor.nbytes for tensor in tensors.values())

    def fingerprint(self, model: TorchModel) -> str:
        """Of the graph's ops in order and every weight."""
        return fingerprint(model)

    def first_non_finite(self, model: TorchModel, inputs: Any) -> str | None:
        """Of the graph that is run."""
        return observe.first_non_finite(model, model.call(inputs))

    def save(self, model: TorchModel, path: Path) -> None:
        """The portable form, in `torch.export`'s own format."""
        storage.save(model, path)

    def draw(self, model: TorchModel, path: Path) -> tuple[Path, ...]:
        """An exported program, `.pt2`, where the model is one graph, and the code of its graphs."""
        return storage.draw(model, path)

    def restore(self, path: Path) -> TorchModel:
        """Load the portable form and put the integer kernels in."""
        return storage.restore(path)

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """By torch's own switch."""
        before = torch.get_num_threads()
        torch.set_num_threads(count or before)
        try:
            yield
        finally:
            torch.set_num_threads(before)
