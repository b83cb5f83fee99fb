"""Op type names in files of Intel Neural Compressor.

Sources: the lists of op types in `neural_compressor/adaptor/*.yaml` and `unify_op_type_mapping` of
the adaptors there, Intel Neural Compressor 1.14 (Apache License 2.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: INC's name, normalized by `_normalize_type` → op types, if different from the name.
_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    # PyTorch modules, and the fused modules of eager mode.
    "linear": ("linear", "addmm"),
    "linearrelu": ("linear", "addmm"),
    **{f"conv{d}": (f"conv{d}", "convolution") for d in ("1d", "3d")},
    **{f"conv{name}{d}": (f"conv{d}",) for name in ("relu", "bn", "bnrelu") for d in ("2d", "3d")},
    **{f"batchnorm{d}": ("batch_norm",) for d in ("1d", "2d", "3d")},
    **{f"bnrelu{d}": ("batch_norm",) for d in ("2d", "3d")},
    **{f"instancenorm{d}": ("instance_norm",) for d in ("1d", "2d", "3d")},
    "relu6": ("relu6", "hardtanh", "Relu6"),
    "embedding": ("embedding",),
    "embeddingbag": ("embedding_bag",),
    "floatfunctional": ("add", "mul", "cat"),
    "lstm": ("lstm", "LSTM"),
    "gru": ("gru", "GRU"),
    "quantstub": (),
    "dropout": (),
    # One name for several TensorFlow op types.
    "conv2d": ("conv2d", "Conv2D", "DepthwiseConv2dNative"),
    "batchnorm": ("FusedBatchNormV3",),
    "pooling": ("MaxPool", "MaxPool3D", "AvgPool"),
    "concat": ("cat", "Concat", "ConcatV2"),
    "concatv2": ("ConcatV2",),
    "matmul": ("matmul", "MatMul", "BatchMatMul", "BatchMatMulV2"),
    "pad": ("Pad",),
    # ONNX types outside the standard schemas, found in optimized models.
    "attention": ("Attention",),
    "embedlayernormalization": ("EmbedLayerNormalization",),
    **{
        name: (name.capitalize(),)
        for name in ("conv", "gather", "gemm", "split", "squeeze", "reshape", "resize", "add")
    },
}


def matching_op_types(types: Iterable[str], op_type: str) -> tuple[str, ...] | None:
    """Return the op types of a model that match INC's name.

    Args:
        types: op types of the model.
        op_type: an op type as written in INC's files.

    Returns:
        The matching part of `types`, maybe empty; None if the name is neither an INC name nor an
        op type of the model.
    """
    plain = _normalize_type(op_type)
    meant = _OTHERWISE.get(plain, ())
    matches = tuple(name for name in types if name in meant or _normalize_type(name) == plain)
    return matches if matches or plain in _OTHERWISE else None


def _normalize_type(op_type: str) -> str:
    return op_type.casefold().replace("_", "")
