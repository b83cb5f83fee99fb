"""The ONNX Runtime adaptor."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.named_graphs import with_weights
from neural_mp.adaptors.common.sensitivity import build_weight_corrections
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.onnxrt import layer_params, observe, profiler
from neural_mp.adaptors.onnxrt.base import OnnxGraphAdaptor
from neural_mp.adaptors.onnxrt.capabilities import find_kernels
from neural_mp.adaptors.onnxrt.convert import convert_graph
from neural_mp.adaptors.onnxrt.files import loading, storage
from neural_mp.adaptors.onnxrt.graph.sessions import CPU, check_provider
from neural_mp.adaptors.onnxrt.int8_accumulation import int8_accumulation
from neural_mp.adaptors.onnxrt.kernels.registry import every_op_type
from neural_mp.adaptors.onnxrt.model import OnnxModel, build_graph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.util.system.memory import pause_garbage_collection

#: Environment variable with the execution provider.
PROVIDER_VARIABLE = "NEURAL_MP_ONNX_PROVIDER"


class OnnxRuntimeAdaptor(OnnxGraphAdaptor[OnnxModel]):
    """The adaptor of ONNX files, messages and serialized messages.

    Args:
        provider: name of the execution provider; by default `NEURAL_MP_ONNX_PROVIDER`, else that
            of a saved model, else CPU.
    """

    row_scaled_types = frozenset({"MatMul", "Gemm"})
    unoptimized_run = optional.UnoptimizedRun(
        observe.run_without_optimizations, observe.first_deviating_op
    )
    corrections = optional.Corrections(
        layer_params.collect_layer_params,
        layer_params.with_layer_params,
        values=observe.observe_values,
    )
    layer_inputs = optional.LayerInputs(layer_params.collect_stored_layers, observe.observe_values)
    grouped_weights = build_weight_corrections(layer_inputs, with_weights)
    portability = optional.Portability(
        layer_params.full_range_kernels, layer_params.with_unsigned_weights
    )
    single_file = optional.SingleFile((".onnx",), storage.save_file, storage.add_metadata)
    transfer = optional.Transfer("onnx", storage.model_boundary, storage.transfer_file)

    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    convert_graph = staticmethod(convert_graph)
    native = staticmethod(storage.to_message)
    save = staticmethod(storage.save_model)
    time_ops = staticmethod(profiler.time_ops)
    trace_kernels = staticmethod(profiler.trace_kernels)
    export_onnx = staticmethod(storage.save_file)
    dump_graph = staticmethod(storage.dump_graph)

    def __init__(self, provider: str | None = None) -> None:
        self.provider = provider or os.environ.get(PROVIDER_VARIABLE) or ""

    def with_provider(self, provider: str) -> OnnxRuntimeAdaptor:
        """Return the adaptor of a provider.

        Raises:
            ConfigurationError: the installed ONNX Runtime does not have the provider.
        """
        return OnnxRuntimeAdaptor(check_provider(provider))

    def read_model(self, source: object, spec: InputSpec) -> OnnxModel:
        """Read and canonicalize a model."""
        with pause_garbage_collection():
            return loading.load_model(source, spec, check_provider(self.provider or CPU))

    def kernels(self, model: OnnxModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return kernels from the provider's kernel registry and ONNX's schemas."""
        if model.provider != CPU:  # the probe covers CPU kernels only
            return find_kernels(model, dict.fromkeys(KernelKind, Int8Accumulation.EXACT))
        return find_kernels(model, self.int8_accumulation(hardware))

    def op_types(self) -> Collection[str]:
        """Return the op types of ONNX and ONNX Runtime."""
        return every_op_type(self.provider or CPU)

    def restore(self, folder: Path) -> OnnxModel:
        """Read back the files of `save`."""
        return storage.restore_model(folder, self.provider)
