"""What op types are called in files of Intel Neural Compressor.

Sources: the lists of op types in `neural_compressor/adaptor/*.yaml` and `unify_op_type_mapping` of
the adaptors there, Intel Neural Compressor 1.14 (Apache License 2.0).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

#: Their word, as `_plain` has it → the op types that it means, where it is not the op type itself.
_OTHERWISE: Mapping[str, tuple[str, ...]] = {
    # Modules of PyTorch, and what its eager mode makes of two or three of them.
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
    # One word for several op types of TensorFlow.
    "conv2d": ("conv2d", "Conv2D", "DepthwiseConv2dNative"),
    "batchnorm": ("FusedBatchNormV3",),
    "pooling": ("MaxPool", "MaxPool3D", "AvgPool"),
    "concat": ("cat", "Concat", "ConcatV2"),
    "concatv2": ("ConcatV2",),
    "matmul": ("matmul", "MatMul", "BatchMatMul", "BatchMatMulV2"),
    "pad": ("Pad",),
    # Types of ONNX that its own schemas do not have: they come with optimised models.
    "attention": ("Attention",),
    "embedlayernormalization": ("EmbedLayerNormalization",),
    **{
        name: (name.capitalize(),)
        for name in ("conv", "gather", "gemm", "split", "squeeze", "reshape", "resize", "add")
    },
}


def in_words_of(types: Iterable[str], word: str) -> tuple[str, ...] | None:
    """The op types of a model that one of their words means.

    Args:
        types: the op types that the model has.
        word: an op type as their files write it.

    Returns:
        Those of `types` that are meant; none where the model has no such op; None where the word
        is neither theirs nor an op type of the model.
    """
    plain = _plain(word)
    meant = _OTHERWISE.get(plain, ())
    found = tuple(name for name in types if name in meant or _plain(name) == plain)
    return found if found or plain in _OTHERWISE else None


def _plain(word: str) -> str:
    return word.casefold().replace("_", "")
