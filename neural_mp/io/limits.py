"""Limits of what is read from untrusted files: above anything that a sound file holds."""

from __future__ import annotations

# Any file.
#: A document is read as a whole, and once more as what it is parsed into.
MAX_FILE_BYTES = 1 << 28
#: Data sets and logs are as large as their owner made them; only what never ends is refused.
MAX_DATA_BYTES = 1 << 32
#: A parsed value takes up to a hundred bytes of memory.
MAX_VALUES = 10_000_000
#: Annotations of a million pictures, and logs of a million calls.
MAX_DATA_VALUES = 1 << 28
#: The deepest sound nesting is that of module names; a Python frame for each must fit the stack.
MAX_DEPTH = 100
#: A float has at most 309 digits before the point; time to read an integer grows with the square.
MAX_NUMBER_CHARS = 400

# Tuning files.
#: Options for ten thousand ops; each value is checked in Python, and looked up as a file name.
MAX_SETTINGS_VALUES = 1_000_000

# Archives and packed arrays.
#: Members of an archive: more than the weights of any model.
MAX_ARCHIVE_MEMBERS = 100_000
#: Unpacked bytes over packed bytes; floats pack far worse, zeros a thousandfold.
MAX_COMPRESSION_RATIO = 200
#: Parts of models may be packed better up to here; their writers pack nothing but small text.
RATIO_EXEMPT_MODEL_BYTES = 1 << 24
#: Single arrays of data may be packed, repeated or left sparse up to here: masks are mostly zeros.
RATIO_EXEMPT_ARRAY_BYTES = 1 << 30
#: Length of an axis of a numpy array that takes no bytes at all.
MAX_EMPTY_ARRAY_LENGTH = 1_000_000

# HDF5 and Keras.
#: Groups and arrays of a file: more than the weights of any model.
MAX_HDF5_OBJECTS = 1_000_000

#: Bytes of weights that are made over those in the file; an optimizer keeps two more of each.
MAX_KERAS_WEIGHT_RATIO = 4
#: Weights that are made in addition: those that are not kept in files, such as those of metrics.
KERAS_EXTRA_WEIGHT_BYTES = 1 << 28

# Descriptions of saved models.
#: Elements of an example input, which is made before the first call.
MAX_EXAMPLE_ELEMENTS = 1 << 28
#: Bytes of an element: those of a complex number.
MAX_ELEMENT_BYTES = 16

# ONNX.
#: Nodes with functions in the place of their calls, which may double at each level.
MAX_ONNX_NODES = 5_000_000

# PyTorch.
#: A node of a graph takes about a hundred values.
MAX_PROGRAM_VALUES = 50_000_000
#: Integers of the format have 64 bits.
MAX_PROGRAM_INTEGER = 1 << 64
#: torch holds tensors of at most so many axes.
MAX_TENSOR_AXES = 64
#: Values of a pickle, which may refer to the same list again and again.
MAX_PICKLE_NODES = 200_000
#: Elements that an expanded tensor shows over those that it has: the largest batches.
MAX_EXPANSION_RATIO = 1024
#: Expressions of sizes: what PyTorch writes is far shorter, and is parsed by Python.
MAX_EXPRESSION_CHARS = 20_000
#: A power of a sum is multiplied out.
MAX_EXPRESSION_EXPONENT = 16
#: Terms that products and powers of sums come to, all of which PyTorch multiplies out.
MAX_EXPRESSION_TERMS = 1000
#: Arguments of one maximum or minimum: each is compared with every other.
MAX_EXPRESSION_COMPARED = 16
