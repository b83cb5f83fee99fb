"""The base of the adaptors of ONNX graphs: for ONNX Runtime, and for targets."""

from __future__ import annotations

from typing import TypeVar

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.named_graphs import GraphAdaptor
from neural_mp.adaptors.onnxrt import observe
from neural_mp.adaptors.onnxrt.files import storage
from neural_mp.adaptors.onnxrt.graph.edit import count_tensor_bytes, iterate_all_constants
from neural_mp.adaptors.onnxrt.kernels.ops import TYPES
from neural_mp.adaptors.onnxrt.model import OnnxModel

M = TypeVar("M", bound=OnnxModel)


class OnnxGraphAdaptor(GraphAdaptor[M]):
    """An adaptor of ONNX files, messages and serialized messages, run by ONNX Runtime."""

    framework = "onnxrt"
    title = "ONNX"
    packages = ("onnxruntime", "onnx")
    op_kinds = TYPES
    op_outputs = optional.OpOutputs(
        observe.build_observable_graph, observe.make_op_outputs, observe.first_non_finite
    )

    observe_tensors = staticmethod(observe.observe_tensors)
    observe_and_keep = staticmethod(observe.observe_tensors)
    element_counts = staticmethod(observe.count_tensor_elements)
    fingerprint = staticmethod(storage.model_fingerprint)

    def weight_bytes(self, model: M) -> int:
        """Return the size of the constants in bytes."""
        return sum(map(count_tensor_bytes, iterate_all_constants(model.active_graph)))
