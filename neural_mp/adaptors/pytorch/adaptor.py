"""The PyTorch adaptor."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.signatures.input_spec import InputSpec
from neural_mp.adaptors.common.simulation import Simulation
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.pytorch import capabilities, convert, layer_weights, observe, profiler
from neural_mp.adaptors.pytorch.capture import module_capture
from neural_mp.adaptors.pytorch.capture.canonicalize import build_graph
from neural_mp.adaptors.pytorch.convert import convert_graphs
from neural_mp.adaptors.pytorch.converted_module import (
    compile_parts,
    enable_compiler,
    explain_missing_compiler,
)
from neural_mp.adaptors.pytorch.decoders import decoder_blocks, learned_blocks
from neural_mp.adaptors.pytorch.files import (
    checkpoints,
    layer_storage,
    loading,
    onnx_export,
    storage,
    transfer,
)
from neural_mp.adaptors.pytorch.graph.call_signature import resize_batch
from neural_mp.adaptors.pytorch.graph.int8_cache import enable_int8_cache
from neural_mp.adaptors.pytorch.graph.model import TorchModel, model_fingerprint
from neural_mp.adaptors.pytorch.graph.op_types import TYPES, every_op_type
from neural_mp.adaptors.pytorch.int8_accumulation import int8_accumulation
from neural_mp.adaptors.pytorch.kernels import float_kernels
from neural_mp.adaptors.pytorch.kernels.direct_calls import DirectCalls
from neural_mp.core.enums import COMPILED_RUNTIME, Capture
from neural_mp.core.hardware import Hardware
from neural_mp.util.system.processes import check_process


class PyTorchAdaptor(Adaptor[TorchModel]):
    """Adaptor of `nn.Module`, `torch.export` programs and their `.pt2` files."""

    framework = "pytorch"
    packages = ("torch",)
    row_scaled_types = frozenset({"linear"})
    op_kinds = TYPES
    replaceable_files = layer_storage.TOKENIZER_FILES
    layer_timing = optional.LayerTiming(profiler.list_layer_shapes, profiler.make_layer_run)
    op_outputs = optional.OpOutputs(
        observe.build_observable_graph, observe.make_op_outputs, observe.find_non_finite
    )
    corrections = optional.Corrections(
        layer_weights.collect_layer_params,
        layer_weights.with_layer_params,
        values=observe.observe_values,
    )
    gradients = optional.Gradients(
        layer_weights.constant_weights, layer_weights.compute_weight_gradients
    )
    grouped_weights = optional.GroupedWeights(
        layer_weights.constant_weights,
        decoder_blocks.collect_input_moments,
        decoder_blocks.with_weights,
        blocks=optional.Blocks(
            decoder_blocks.iterate_block_moments, learned_blocks.iterate_learned_weights
        ),
    )
    portability = optional.Portability(convert.full_range_kernels, convert.with_reduced_weights)
    checkpoints = optional.Checkpoints(checkpoints.export_checkpoint, checkpoints.read_checkpoint)
    compiler = optional.Compiler(
        compile_parts, COMPILED_RUNTIME, explain_missing_compiler, enable_compiler
    )
    single_file = optional.SingleFile((".pt2",), storage.save_file)
    transfer = optional.Transfer(
        "onnx", transfer.model_boundary, transfer.write_onnx, transfer.to_tensor
    )

    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    op_types = staticmethod(every_op_type)
    observe_tensors = staticmethod(observe.observe_tensors)
    convert_graph = staticmethod(convert_graphs)
    fingerprint = staticmethod(model_fingerprint)
    time_ops = staticmethod(profiler.time_ops)
    trace_kernels = staticmethod(profiler.trace_kernels)
    hessian_traces = staticmethod(layer_weights.estimate_hessian_traces)
    export_onnx = staticmethod(onnx_export.export_onnx)
    dump_graph = staticmethod(storage.dump_graph)
    record_calls = staticmethod(module_capture.record_calls)
    with_int8_cache = staticmethod(enable_int8_cache)
    faster_kernels = staticmethod(float_kernels.find_faster_kernels)

    @cached_property
    def training(self) -> optional.Training:
        """Training of torch modules, whose code is imported on first use."""
        from neural_mp.adaptors.pytorch.training.gradients import (
            apply_plan,
            list_devices,
            open_trainable,
        )
        from neural_mp.adaptors.pytorch.training.numerics_trace import trace_numerics

        return optional.Training(open_trainable, apply_plan, trace_numerics, list_devices)

    @cached_property
    def simulation(self) -> Simulation[TorchModel]:
        """Training with the rounding of a plan, whose code is imported on first use."""
        from neural_mp.adaptors.pytorch.training.simulation import finish_simulation, simulate_model
        from neural_mp.adaptors.pytorch.training.trainer import Trainer, choose_loss_function

        return Simulation(simulate_model, Trainer, finish_simulation, choose_loss_function)

    def load(
        self,
        source: Any,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> TorchModel:
        """Capture a module or load an exported program; `inputs` may hold example tensors."""
        _check_threads()
        spec = InputSpec.from_arguments(inputs, None, example).without_shapes("PyTorch")
        with torch.no_grad():
            model = loading.load_model(source, spec, capture)
        if outputs is None:
            return model
        ignored = "outputs is not used for PyTorch: a module returns what its forward returns"
        return replace(model, warnings=(*model.warnings, ignored))

    def save(self, model: TorchModel, folder: Path) -> None:
        """Write the model: as one program, or as a folder of `transformers`."""
        (storage if model.shell is None else layer_storage).save_model(model, folder)

    def restore(self, folder: Path) -> TorchModel:
        """Return a model written by `save`."""
        _check_threads()
        in_layers = (folder / layer_storage.LAYERS_FILE).is_file()
        return (layer_storage if in_layers else storage).restore_model(folder)

    def kernels(self, model: TorchModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels of each op; for 16 bits, each distinct call is run once."""
        return capabilities.find_kernels(model, hardware, self.int8_accumulation(hardware))

    def predict(self, model: TorchModel, inputs: object) -> Any:
        """Return the outputs: arrays if the inputs are arrays, else tensors."""
        return model.cached_result(_build_direct_calls)(inputs)

    def example_inputs(self, model: TorchModel, batch_size: int | None = None) -> Any:
        """Return the captured example: a tuple if any input is positional, else a dict."""
        call = model.example if batch_size is None else resize_batch(model.example, batch_size)
        return dict(call.kwargs) if call.kwargs and not call.args else call.args

    def element_counts(
        self, model: TorchModel, inputs: object, tensors: Collection[str]
    ) -> dict[str, float]:
        """Return the sizes known from the capture, or those of a run if they depend on values."""
        counts = observe.infer_element_counts(model, inputs, tensors)
        return super().element_counts(model, inputs, tensors) if counts is None else counts

    def native(self, model: TorchModel) -> Any:
        """Return the user's own module for an untouched model, else one of the captured graph."""
        if model.compiles:
            return model.cached_result(compile_parts)
        if model.original is not None:
            return model.original
        return model.cached_result(checkpoints.build_user_module)

    def weight_bytes(self, model: TorchModel) -> int:
        """Return the bytes of parameters and buffers in the portable form."""
        tensors = {id(tensor): tensor for tensor in model.weights.values()}
        return sum(tensor.nbytes for tensor in tensors.values())

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """Set torch's number of threads for the context."""
        previous = torch.get_num_threads()
        torch.set_num_threads(count or previous)
        try:
            yield
        finally:
            torch.set_num_threads(previous)


def _build_direct_calls(model: TorchModel) -> DirectCalls:
    return DirectCalls(model, model.cached_result(compile_parts) if model.compiles else None)


def _check_threads() -> None:
    """Refuse to pack weights in a forked child that would wait for its parent's threads."""
    if torch.get_num_threads() > 1:
        check_process("PyTorch", ", or call torch.set_num_threads(1) in the child first")
