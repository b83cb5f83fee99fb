"""The ONNX Runtime adaptor."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.input_spec import InputSpec, unused_capture
from neural_mp.adaptors.common.optional import (
    Corrections,
    Drawing,
    KernelTrace,
    OnnxExport,
    OpOutputs,
    OpTiming,
    Portability,
    SingleFile,
)
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.onnxrt import (
    layer_params,
    loading,
    observe,
    profiler,
    reduce_range,
    storage,
)
from neural_mp.adaptors.onnxrt.capabilities import kernels
from neural_mp.adaptors.onnxrt.convert import write
from neural_mp.adaptors.onnxrt.graph import build_graph
from neural_mp.adaptors.onnxrt.graph_edit import tensor_bytes, tensors_in
from neural_mp.adaptors.onnxrt.int8_accumulation import int8_accumulation
from neural_mp.adaptors.onnxrt.kernel_registry import every_op_type
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.op_types import TYPES
from neural_mp.adaptors.onnxrt.sessions import CPU, limited_threads
from neural_mp.core.enums import Capture
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind

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
    op_kinds = TYPES
    op_timing = OpTiming(profiler.time_ops)
    kernel_trace = KernelTrace(profiler.trace)
    op_outputs = OpOutputs(observe.results, observe.values, observe.first_non_finite)
    corrections = Corrections(layer_params.layers, layer_params.with_layers)
    portability = Portability(reduce_range.wide_kernels, reduce_range.with_unsigned_weights)
    single_file = SingleFile((".onnx",), storage.save_file)
    onnx_export = OnnxExport(storage.save_file)
    drawing = Drawing(storage.draw)

    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    observe_tensors = staticmethod(observe.watch)
    convert_graph = staticmethod(write)
    native = staticmethod(storage.whole)
    save = staticmethod(storage.save)
    threads = staticmethod(limited_threads)

    def __init__(self, provider: str | None = None) -> None:
        self.provider = provider or os.environ.get(PROVIDER_VARIABLE) or CPU

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
        wanted = InputSpec.read(inputs, outputs, example).without_shapes("ONNX")
        model = loading.load(source, wanted, self.provider)
        return replace(model, warnings=(*model.warnings, *unused_capture("ONNX", capture)))

    def kernels(self, model: OnnxModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """From the kernel registry of the execution provider, and from ONNX's schemas."""
        if model.provider != CPU:  # what is tried are the CPU's kernels
            return kernels(model, dict.fromkeys(KernelKind, Int8Accumulation.EXACT))
        return kernels(model, self.int8_accumulation(hardware))

    def op_types(self) -> Collection[str]:
        """Those of ONNX, and of ONNX Runtime's own."""
        return every_op_type(self.provider)

    def predict(self, model: OnnxModel, inputs: Any) -> Any:
        """Outputs as arrays."""
        results = model.run(model.signature.bind(inputs))
        return model.signature.packed(results)

    def example_inputs(self, model: OnnxModel, batch_size: int | None = None) -> Any:
        """A tuple in the order of the inputs: the example of the data, else made up."""
        return model.signature.in_order(model.example, batch_size)

    def weight_bytes(self, model: OnnxModel) -> int:
        """Bytes of the constants."""
        return sum(map(tensor_bytes, tensors_in(model.runs)))

    def fingerprint(self, model: OnnxModel) -> str:
        """Of all nodes in order, weights included."""
        return storage.digest(model.runs)

    def restore(self, folder: Path) -> OnnxModel:
        """Read back what `save` wrote."""
        return storage.restore(folder, self.provider)
