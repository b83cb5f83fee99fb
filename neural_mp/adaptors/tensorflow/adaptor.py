"""The TensorFlow adaptor."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.optional import (
    Corrections,
    OpOutputs,
    Portability,
    SingleFile,
    Training,
    Transfer,
)
from neural_mp.adaptors.common.signatures.input_spec import InputSpec, unused_capture_warning
from neural_mp.adaptors.common.simulation import Simulation
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.tensorflow import layer_params, observe, profiler
from neural_mp.adaptors.tensorflow.amp_pass import read_runtime_lists
from neural_mp.adaptors.tensorflow.capture import keras_models, loading
from neural_mp.adaptors.tensorflow.files import graph_files
from neural_mp.adaptors.tensorflow.files.graph_files import SUFFIXES
from neural_mp.adaptors.tensorflow.graph.ops import TYPES
from neural_mp.adaptors.tensorflow.graph.runtime import every_op_type
from neural_mp.adaptors.tensorflow.graph.tensor_graph import count_constant_bytes
from neural_mp.adaptors.tensorflow.int8_accumulation import int8_accumulation
from neural_mp.adaptors.tensorflow.kernels import capabilities, integer_kernels
from neural_mp.adaptors.tensorflow.kernels.convert import convert_frozen_graph
from neural_mp.adaptors.tensorflow.model import TensorFlowModel, build_graph
from neural_mp.amp import FourLists
from neural_mp.core.enums import Capture
from neural_mp.core.hardware import Device, Hardware
from neural_mp.core.precision import Precision
from neural_mp.util.pytree import tree_leaves
from neural_mp.util.system.processes import check_process

logger = logging.getLogger(__name__)


def list_devices() -> list[Device]:
    """Return the CPU, the GPUs, and devices of TensorFlow plug-ins, e.g. Intel's XPU."""
    result = []
    for device in tf.config.list_physical_devices():
        kind = device.device_type.lower()
        details = tf.config.experimental.get_device_details(device) if kind != "cpu" else {}
        name = "CPU" if kind == "cpu" else details.get("device_name", device.name)
        result.append(Device("tensorflow", kind, name))
    return result


class TensorFlowAdaptor(Adaptor[TensorFlowModel]):
    """Keras models, SavedModels, concrete functions, and frozen graphs."""

    framework = "tensorflow"
    packages = ("tensorflow", "keras")
    frees_axes = True
    op_kinds = TYPES
    op_outputs = OpOutputs(
        observe.build_observable_graph, observe.make_op_outputs, observe.first_non_finite
    )
    corrections = Corrections(
        layer_params.collect_layer_params,
        layer_params.with_layer_params,
        layer_params.channel_preserving_ops,
        observe.observe_values,
    )
    portability = Portability(
        integer_kernels.full_range_kernels, integer_kernels.with_reduced_weights
    )
    single_file = SingleFile(SUFFIXES, graph_files.save_file)
    transfer = Transfer(
        "saved_model", graph_files.model_boundary, graph_files.transfer_folder, tf.convert_to_tensor
    )

    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    op_types = staticmethod(every_op_type)
    observe_tensors = staticmethod(observe.watch_statistics)
    element_counts = staticmethod(observe.count_tensor_elements)
    convert_graph = staticmethod(convert_frozen_graph)
    save = staticmethod(graph_files.save_model)
    restore = staticmethod(graph_files.restore_model)
    time_ops = staticmethod(profiler.time_ops)
    trace_kernels = staticmethod(profiler.trace_kernels)
    hessian_traces = staticmethod(layer_params.estimate_hessian_traces)
    dump_graph = staticmethod(graph_files.dump_graph)
    record_calls = staticmethod(keras_models.record_calls)

    @cached_property
    def training(self) -> Training:
        """Training of Keras models, whose code is imported on first use."""
        from neural_mp.adaptors.tensorflow.training.numerics_trace import (
            open_trainable,
            trace_numerics,
        )
        from neural_mp.adaptors.tensorflow.training.policies import apply_plan

        return Training(open_trainable, apply_plan, trace_numerics, list_devices)

    @cached_property
    def simulation(self) -> Simulation[TensorFlowModel]:
        """Training with the rounding of a plan, whose code is imported on first use."""
        from neural_mp.adaptors.tensorflow.training.simulated_model import (
            finish_simulation,
            read_trained_model,
            simulate_model,
        )
        from neural_mp.adaptors.tensorflow.training.trainer import Trainer, choose_loss_function

        return Simulation(
            simulate_model, Trainer, finish_simulation, choose_loss_function, read_trained_model
        )

    def load(
        self,
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
        capture: Capture = Capture.WHOLE,
    ) -> TensorFlowModel:
        """Freeze and canonicalize a model. `inputs` are names, example arrays, or shapes."""
        check_process("TensorFlow")
        model = loading.load_model(source, InputSpec.from_arguments(inputs, outputs, example))
        return replace(
            model, warnings=(*model.warnings, *unused_capture_warning("TensorFlow", capture))
        )

    def to_picklable(self, model: TensorFlowModel) -> TensorFlowModel:
        """Return the graph without the Keras model, whose copy would get other layer names."""
        return replace(model, original=None)

    def kernels(self, model: TensorFlowModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels in the runtime's registry and AMP lists that also pass probes."""
        return capabilities.find_kernels(model, self.int8_accumulation(hardware))

    def amp_lists(self, precision: Precision) -> FourLists:
        """Return the lists of the installed TensorFlow, or the framework-neutral defaults."""
        return read_runtime_lists(precision) or super().amp_lists(precision)

    def predict(self, model: TensorFlowModel, inputs: object) -> Any:
        """Return the outputs as arrays, or as tensors if the inputs are tensors."""
        results = model.run(model.signature.bind_inputs(inputs))
        if type(inputs) is np.ndarray:
            return model.signature.pack_outputs(results)
        # `tf.is_tensor` on an array costs as much time as running a small graph.
        if any(type(leaf) is not np.ndarray and tf.is_tensor(leaf) for leaf in tree_leaves(inputs)):
            results = [tf.convert_to_tensor(result) for result in results]
        return model.signature.pack_outputs(results)

    def example_inputs(self, model: TensorFlowModel, batch_size: int | None = None) -> Any:
        """Return a tuple in input order: the example if the model has one, else generated."""
        return model.signature.in_order(model.example, batch_size)

    def native(self, model: TensorFlowModel) -> Any:
        """Return the user's Keras model if unconverted, else a `ConvertedModel`."""
        return model.original if model.original is not None else model.module

    def weight_bytes(self, model: TensorFlowModel) -> int:
        """Return the total size of the constants in bytes."""
        return sum(map(count_constant_bytes, model.source.nodes.values()))

    def fingerprint(self, model: TensorFlowModel) -> str:
        """Return a digest of all nodes in order, weights included."""
        digest = hashlib.sha256()
        for node in model.source.nodes.values():
            digest.update(node.SerializeToString(deterministic=True))
        return digest.hexdigest()

    @contextmanager
    def threads(self, count: int | None) -> Iterator[None]:
        """Request a thread count, which TensorFlow only accepts before its first run."""
        if count is not None:
            try:
                tf.config.threading.set_intra_op_parallelism_threads(count)
            except RuntimeError:
                if tf.config.threading.get_intra_op_parallelism_threads() != count:
                    logger.warning(
                        "TensorFlow keeps its number of threads after a first run; to use %d, set "
                        "tf.config.threading.set_intra_op_parallelism_threads before",
                        count,
                    )
        yield
