"""Limits for reading untrusted files, above all values in valid files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

# Any file.
#: A document is in memory twice: as text and parsed.
MAX_FILE_BYTES = 1 << 28
#: Data sets and logs: high enough for all valid files, but finite.
MAX_DATA_BYTES = 1 << 32
#: A parsed value occupies up to 100 bytes of memory.
MAX_VALUES = 10_000_000
#: Annotations of a million images, and logs of a million calls.
MAX_DATA_VALUES = 1 << 28
#: Valid files nest no deeper than module names; each level needs a Python stack frame.
MAX_DEPTH = 100
#: A float has up to 309 digits before the point; parsing an integer costs quadratic time.
MAX_NUMBER_CHARS = 400

# Tuning files.
#: Options for ten thousand ops; each value is validated in Python, and looked up as a file name.
MAX_SETTINGS_VALUES = 1_000_000

# Archives and packed arrays.
#: Members of an archive: more than the weights of any model.
MAX_ARCHIVE_MEMBERS = 100_000
#: Decompressed over compressed bytes; floats compress far less, zeros about 1000-fold.
MAX_COMPRESSION_RATIO = 200
#: Members of models up to this size may exceed the ratio; only short text is compressed.
RATIO_EXEMPT_MODEL_BYTES = 1 << 24
#: Data arrays up to this size may exceed the ratio: masks are mostly zeros. The limit is that of an
#: array, and of all such members of one file.
RATIO_EXEMPT_ARRAY_BYTES = 1 << 30
#: Axis length of a numpy array without any bytes.
MAX_EMPTY_ARRAY_LENGTH = 1_000_000

# HDF5 and Keras.
#: Groups and arrays of a file: more than the weights of any model.
MAX_HDF5_OBJECTS = 1_000_000

#: Bytes of created weights over bytes in the file; optimizers keep two more per weight.
MAX_KERAS_WEIGHT_RATIO = 4
#: Bytes of weights not stored in files, e.g. those of metrics.
KERAS_EXTRA_WEIGHT_BYTES = 1 << 28

# Descriptions of saved models.
#: Elements of an example input, which is allocated before the first call.
MAX_EXAMPLE_ELEMENTS = 1 << 28
#: Bytes per element: complex128.
MAX_ELEMENT_BYTES = 16

# TensorFlow.
#: Inputs, or results, of one node: more than the outputs of any split.
MAX_NODE_TENSORS = 1 << 16
#: Limit of TensorFlow.
MAX_TENSOR_RANK = 254
#: Names of nodes, functions and variables: TensorFlow searches errors for names in quadratic time.
MAX_NODE_NAME_CHARS = 10_000
#: Bytes of a constant that repeats one value: the largest size of a graph file.
MAX_REPEATED_BYTES = 1 << 31

# ONNX.
#: Nodes after function inlining, which may double the count per level.
MAX_ONNX_NODES = 5_000_000

# LiteRT.
#: Axes of a tensor: limit of its kernels.
MAX_LITERT_RANK = 8
#: Bytes of all tensors of a file, most of which share memory: batches of the largest nets.
MAX_LITERT_TENSOR_BYTES = 1 << 34

# PyTorch.
#: A graph node has about 100 values.
MAX_PROGRAM_VALUES = 50_000_000
#: The format's integers have 64 bits.
MAX_PROGRAM_INTEGER = 1 << 64
#: Limit of torch.
MAX_TENSOR_AXES = 64
#: Values of a pickle, counted per reference: lists may be referenced repeatedly.
MAX_PICKLE_NODES = 200_000
#: Elements of an expanded tensor over its stored elements: the largest batches.
MAX_EXPANSION_RATIO = 1024
#: Size expressions, parsed by Python; those written by PyTorch are far shorter.
MAX_EXPRESSION_CHARS = 20_000
#: PyTorch expands powers of sums.
MAX_EXPRESSION_EXPONENT = 16
#: Terms of a size expression after PyTorch's expansion of products and powers.
MAX_EXPRESSION_TERMS = 1000
#: Arguments of a `Max` or `Min`, which are compared pairwise.
MAX_EXPRESSION_COMPARED = 16

# Folders of transformers.
#: Weights and modules of a model over weights in its files: shared weights are stored once.
MAX_FOLDER_WEIGHT_RATIO = 4
#: Weights, modules and elements that are not stored: tables of positions, heads, activations.
UNSAVED_WEIGHTS = 1000
UNSAVED_MODULES = 10_000
UNSAVED_ELEMENTS = 1 << 26
#: Classes of a classifier, each of which gets a name.
MAX_LABELS = 1 << 20
#: Header of a `.safetensors` file: limit of its format.
MAX_HEADER_BYTES = 100_000_000


def count_excess_bytes(sizes: Iterable[tuple[int, int]]) -> int:
    """Return the bytes of all parts of a file that exceed the compression ratio.

    `sizes` are, for each part, its bytes in memory and in the file.
    """
    return sum(size for size, stored in sizes if size > MAX_COMPRESSION_RATIO * stored)


_names: ContextVar[tuple[str, ...]] = ContextVar("trusted", default=())


@contextmanager
def trusting(names: Iterable[str]) -> Iterator[None]:
    """Trust further names in this context.

    Args:
        names: modules whose code a tuning file may reference, and ops with side effects that a
            model file may contain.
    """
    token = _names.set((*_names.get(), *names))
    try:
        yield
    finally:
        _names.reset(token)


def is_trusted(name: str) -> bool:
    """Whether a name or any of its parents is trusted: `sklearn.metrics` if `sklearn` is."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in _names.get())
