"""What the ops of a model compute in a run, under the names of the untouched model.

A converted model has the result of an op under another name, stored in integers or 16 bits, or not
at all where the op runs within the kernel of another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.core.graph import Op, OpGraph
from neural_mp.util.pytree import Array
from neural_mp.util.validators import integer, non_negative_float, string, tuple_of


@dataclass(frozen=True)
class OpOutput:
    """The result of an op in one run.

    Attributes:
        real: the real numbers, float32.
        stored: the type that the model has them in, such as `float32` or `uint8`.
    """

    real: NDArray[np.float32]
    stored: str


@dataclass(frozen=True)
class OutputLocation:
    """Where a converted model has the result of an op.

    Attributes:
        tensor: the name of the tensor.
        type: the type of the op in the untouched model.
        encoding: how the result is stored in uint8; None where it is stored as real numbers.
    """

    tensor: str
    type: str
    encoding: QuantParams | None = None

    def to_list(self) -> list[Any]:
        """Plain strings and numbers, as written to JSON."""
        stored = self.encoding
        return [self.tensor, self.type, *([stored.scale, stored.zero_point] if stored else ())]

    @classmethod
    def from_list(cls, data: object) -> OutputLocation:
        """Read back what `to_list` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        bare = isinstance(data, list) and len(data) == len(_BARE)
        tensor, kind, *stored = tuple_of(*_BARE, *(() if bare else (non_negative_float, integer)))(
            data
        )
        return cls(tensor, kind, QuantParams(*stored) if stored else None)


_BARE = (string, string)


def op_value(found: Array, encoding: QuantParams | None) -> OpOutput | None:
    """The value that was found in a tensor; None where it holds no real numbers, or nothing.

    Args:
        found: as the model stores it.
        encoding: how it is stored in uint8.
    """
    name = found.dtype.name
    if not found.size:
        return None
    if encoding is not None:
        real = (found.astype(np.float32) - encoding.zero_point) * np.float32(encoding.scale)
        return OpOutput(real, name)
    if found.dtype.kind != "f" and name != "bfloat16":
        return None
    return OpOutput(found.astype(np.float32, copy=False), name)


def results_graph(
    written: OpGraph, results: Mapping[str, OutputLocation], op_of: Mapping[str, str]
) -> OpGraph:
    """The ops of which a converted model has the results, as the untouched model calls them.

    Args:
        written: the graph of the converted model.
        results: op of the untouched model → where the converted one has its result.
        op_of: tensor of the converted model → the op of `written` whose result it is.
    """
    kept = {
        op_of[result.tensor]: Op(name, result.type)
        for name, result in results.items()
        if result.tensor in op_of
    }
    return written.with_only(kept)
