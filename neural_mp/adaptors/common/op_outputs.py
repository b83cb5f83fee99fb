"""Results of ops in a run, under the op names of the unconverted model.

In a converted model, the result of an op has another name, is quantized or in 16 bits, or does not
exist if the op is fused into another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.core.graph import Op, OpGraph
from neural_mp.util.pytree import Array
from neural_mp.util.validators import integer, non_negative_float, string, tuple_of

#: Number of tensors per run in the search for the first non-finite one.
_SEARCHED_PER_RUN = 64


@dataclass(frozen=True)
class OpOutput:
    """The result of an op in one run.

    Attributes:
        real: the result as float32.
        stored: the dtype in the model, e.g. `float32` or `uint8`.
    """

    real: NDArray[np.float32]
    stored: str


@dataclass(frozen=True)
class OutputLocation:
    """The location of an op's result in a converted model.

    Attributes:
        type: the type of the op in the unconverted model.
        encoding: the quantization parameters of a uint8 tensor; None for a float tensor.
    """

    tensor: str
    type: str
    encoding: QuantParams | None = None

    def to_list(self) -> list[str | float]:
        """Return strings and numbers for JSON."""
        stored = self.encoding
        return [self.tensor, self.type, *([stored.scale, stored.zero_point] if stored else ())]

    @classmethod
    def from_list(cls, data: object) -> OutputLocation:
        """Read back the result of `to_list`; raise `NeuralMPError` if the data is malformed."""
        bare = isinstance(data, list) and len(data) == 2
        numbers = () if bare else (non_negative_float, integer)
        tensor, kind, *stored = tuple_of(string, string, *numbers)(data)
        return cls(tensor, kind, QuantParams(*stored) if stored else None)


def read_op_value(array: Array, encoding: QuantParams | None) -> OpOutput | None:
    """Return a tensor's value as float32; None if the tensor is empty or not float."""
    name = array.dtype.name
    if not array.size:
        return None
    if encoding is not None:
        real = (array.astype(np.float32) - encoding.zero_point) * np.float32(encoding.scale)
        return OpOutput(real, name)
    if array.dtype.kind != "f" and name != "bfloat16":
        return None
    return OpOutput(array.astype(np.float32, copy=False), name)


def build_results_graph(
    written: OpGraph, results: Mapping[str, OutputLocation], op_of: Mapping[str, str]
) -> OpGraph:
    """Return the ops whose results a converted model has, by their unconverted names.

    `op_of` maps tensors of the converted model to the ops of its graph, `written`.
    """
    ops = {
        op_of[result.tensor]: Op(name, result.type)
        for name, result in results.items()
        if result.tensor in op_of
    }
    return written.with_only(ops)


def first_with_non_finite(
    ops: Sequence[str], fetch: Callable[[Sequence[str]], Iterable[Sequence[Array]]]
) -> str | None:
    """Return the first op, in execution order, whose floating-point results hold NaN or Inf.

    `fetch` returns the results of each of some ops in one run.
    """
    for start in range(0, len(ops), _SEARCHED_PER_RUN):
        part = ops[start : start + _SEARCHED_PER_RUN]
        for op, arrays in zip(part, fetch(part), strict=True):
            if not all(np.isfinite(array).all() for array in arrays):
                return op
    return None
