"""What differs between the versions of ONNX Runtime that we run on."""

from __future__ import annotations

import onnxruntime as ort

#: The version, its first two numbers.
VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
#: Whether a session can be told in which folder the weights of a model given as bytes lie. A
#: session passes over settings that it does not know: there is nothing to ask but the version.
FINDS_WEIGHTS = VERSION >= (1, 21)
#: Whether a convolution whose result is read within a branch is run. Before 1.23, ONNX Runtime's
#: own optimiser ends the process there, with the untouched model as well.
RUNS_LAYERS_BEFORE_BRANCHES = VERSION >= (1, 23)
