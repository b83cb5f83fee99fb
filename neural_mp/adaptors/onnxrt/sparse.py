"""Conversion of sparse constants to dense: onnx-ir and integer kernels require dense."""

from __future__ import annotations

import math

import numpy as np
import onnx
from onnx import numpy_helper

from neural_mp.adaptors.onnxrt.file_checks import graphs_within
from neural_mp.errors import ModelLoadError
from neural_mp.io.limits import RATIO_EXEMPT_ARRAY_BYTES


def without_sparse(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with dense constants; the model itself if none is sparse.

    Raises:
        ModelLoadError: a constant exceeds the memory limit, or has indices out of bounds.
    """
    if not any(map(_is_sparse, graphs_within([proto.graph]))):
        return proto
    copy = onnx.ModelProto.FromString(proto.SerializeToString())
    for graph in graphs_within([copy.graph]):
        graph.initializer.extend(map(_dense, graph.sparse_initializer))
        graph.ClearField("sparse_initializer")
        for node in graph.node:
            for attribute in node.attribute:
                if attribute.HasField("sparse_tensor"):
                    attribute.t.CopyFrom(_dense(attribute.sparse_tensor))
                    attribute.ClearField("sparse_tensor")
                    attribute.type, attribute.name = onnx.AttributeProto.TENSOR, "value"
    return copy


def _is_sparse(graph: onnx.GraphProto) -> bool:
    return bool(graph.sparse_initializer) or any(
        attribute.HasField("sparse_tensor") for node in graph.node for attribute in node.attribute
    )


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    name = sparse.values.name
    values, indices = numpy_helper.to_array(sparse.values), numpy_helper.to_array(sparse.indices)
    size = math.prod(sparse.dims)
    if min(sparse.dims, default=0) < 0 or size * values.itemsize > RATIO_EXEMPT_ARRAY_BYTES:
        raise ModelLoadError(
            f"sparse constant {name!r} must have at most {RATIO_EXEMPT_ARRAY_BYTES} bytes when "
            f"dense, got the sizes {list(sparse.dims)}; store a dense tensor"
        )
    dense = np.zeros(size, values.dtype)
    try:
        if indices.ndim > 1:
            indices = np.ravel_multi_index(tuple(indices.T), tuple(sparse.dims))
        dense[indices] = values
    except (IndexError, ValueError) as error:
        raise ModelLoadError(
            f"the indices of the sparse constant {name!r} must lie within its sizes "
            f"{list(sparse.dims)}: {error}"
        ) from error
    return numpy_helper.from_array(dense.reshape(tuple(sparse.dims)), name)
