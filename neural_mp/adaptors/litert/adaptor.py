"""The LiteRT adaptor."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.named_graphs import GraphAdaptor
from neural_mp.adaptors.litert import layer_params, observe, profiler
from neural_mp.adaptors.litert.capabilities import STORED_PRECISIONS, find_kernels
from neural_mp.adaptors.litert.convert import convert_graph, with_integer_io, with_weight_scales
from neural_mp.adaptors.litert.files import loading, storage
from neural_mp.adaptors.litert.int8_accumulation import int8_accumulation
from neural_mp.adaptors.litert.model import LiteRtModel, build_graph
from neural_mp.adaptors.litert.ops import TYPES
from neural_mp.core.hardware import Hardware


class LiteRtAdaptor(GraphAdaptor[LiteRtModel]):
    """The adaptor of `.tflite` files, and of models of TensorFlow that are converted to these."""

    framework = "litert"
    title = "LiteRT"
    packages = ("ai-edge-litert", "ai-edge-quantizer")
    op_kinds = TYPES
    stored_precisions = STORED_PRECISIONS
    op_outputs = optional.OpOutputs(
        observe.build_observable_graph, observe.make_op_outputs, observe.first_non_finite
    )
    corrections = optional.Corrections(
        layer_params.collect_layer_params,
        layer_params.with_layer_params,
        values=observe.observe_values,
    )
    layer_inputs = optional.LayerInputs(layer_params.collect_stored_layers, observe.observe_values)
    single_file = optional.SingleFile((loading.SUFFIX,), storage.save_file)

    read_model = staticmethod(loading.load_model)
    graph = staticmethod(build_graph)
    int8_accumulation = staticmethod(int8_accumulation)
    observe_tensors = staticmethod(observe.observe_tensors)
    convert_graph = staticmethod(convert_graph)
    with_integer_io = staticmethod(with_integer_io)
    with_weight_scales = staticmethod(with_weight_scales)
    save = staticmethod(storage.save_model)
    restore = staticmethod(storage.restore_model)
    time_ops = staticmethod(profiler.time_ops)
    trace_kernels = staticmethod(profiler.trace_kernels)
    dump_graph = staticmethod(storage.dump_graph)

    def kernels(self, model: LiteRtModel, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels of XNNPACK."""
        return find_kernels(model, self.int8_accumulation(hardware))

    def to_picklable(self, model: LiteRtModel) -> LiteRtModel:
        """Return the model itself, which is pickled as the content of its file."""
        return model

    def native(self, model: LiteRtModel) -> bytes:
        """Return the flatbuffer."""
        return model.active_graph.content

    def weight_bytes(self, model: LiteRtModel) -> int:
        """Return the size of the constants in bytes."""
        tree = model.active_graph.tree
        used = {tensor.buffer for graph in tree.subgraphs for tensor in graph.tensors}
        return sum(
            len(tree.buffers[index].data) for index in used if tree.buffers[index].data is not None
        )

    def fingerprint(self, model: LiteRtModel) -> str:
        """Return a digest of the graph and its weights."""
        return hashlib.sha256(model.active_graph.content).hexdigest()
