"""The OpenVINO adaptor."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.named_graphs import GraphAdaptor, with_weights
from neural_mp.adaptors.common.sensitivity import build_weight_corrections
from neural_mp.adaptors.openvino import files, layer_params, observe, profiler
from neural_mp.adaptors.openvino.capabilities import find_kernels
from neural_mp.adaptors.openvino.convert import convert_graph
from neural_mp.adaptors.openvino.graph.edit import iterate_nested_graphs
from neural_mp.adaptors.openvino.int8_accumulation import int8_accumulation
from neural_mp.adaptors.openvino.model import OpenVinoModel, build_graph, rename_ops, with_streams
from neural_mp.adaptors.openvino.ops import TYPES, Role, has_role
from neural_mp.adaptors.openvino.runtime import ov
from neural_mp.core.hardware import Hardware


class OpenVinoAdaptor(GraphAdaptor[OpenVinoModel]):
    """The adaptor of `openvino.Model` objects and files that OpenVINO reads."""

    framework = "openvino"
    title = "OpenVINO"
    packages = ("openvino",)
    op_kinds = TYPES
    op_outputs = optional.OpOutputs(
        observe.build_observable_graph, observe.make_op_outputs, observe.first_non_finite
    )
    corrections = optional.Corrections(
        layer_params.collect_layer_params,
        layer_params.with_layer_params,
        values=observe.observe_values,
    )
    layer_inputs = optional.LayerInputs(layer_params.collect_stored_layers, observe.observe_values)
    grouped_weights = build_weight_corrections(layer_inputs, with_weights)
    portability = optional.Portability(
        layer_params.full_range_kernels, layer_params.with_reduced_range
    )
    single_file = optional.SingleFile((".xml",), files.save_file)
    unoptimized_run = optional.UnoptimizedRun(
        observe.run_without_optimizations, observe.first_deviating_op
    )

    read_model = staticmethod(files.load_model)
    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    observe_tensors = staticmethod(observe.observe_tensors)
    convert_graph = staticmethod(convert_graph)
    save = staticmethod(files.save_model)
    restore = staticmethod(files.restore_model)
    time_ops = staticmethod(profiler.time_ops)
    trace_kernels = staticmethod(profiler.trace_kernels)
    dump_graph = staticmethod(files.dump_graph)
    with_op_names = staticmethod(rename_ops)
    with_streams = staticmethod(with_streams)

    def kernels(self, model: OpenVinoModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels of the CPU plugin."""
        return find_kernels(model, self.int8_accumulation(hardware))

    def to_picklable(self, model: OpenVinoModel) -> OpenVinoModel:
        """Return the model itself, which is pickled as the contents of its files."""
        return model

    def element_counts(
        self, model: OpenVinoModel, inputs: object, tensors: Collection[str]
    ) -> dict[str, float]:
        """Return the sizes that OpenVINO infers, or those of a run if they depend on values."""
        counts = observe.infer_element_counts(model, inputs, tensors)
        return super().element_counts(model, inputs, tensors) if counts is None else counts

    def native(self, model: OpenVinoModel) -> ov.Model:
        """Return the `openvino.Model`."""
        return model.active_graph

    def weight_bytes(self, model: OpenVinoModel) -> int:
        """Return the size of the constants in bytes."""
        nodes = (
            node for graph in iterate_nested_graphs(model.active_graph) for node in graph.get_ops()
        )
        constants = (node for node in nodes if has_role(node, Role.CONSTANT))
        return sum(int(np.asarray(node.get_data()).nbytes) for node in constants)

    def fingerprint(self, model: OpenVinoModel) -> str:
        """Return a digest of all nodes and weights."""
        return files.program_digest(model.active_graph)
