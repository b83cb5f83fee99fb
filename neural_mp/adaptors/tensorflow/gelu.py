"""GELU as frameworks spell it out in elementary ops, recognised by what it computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from scipy import special

from neural_mp.adaptors.common.fusion import Step
from neural_mp.adaptors.tensorflow.tensor_graph import Consumers, TensorGraph, data_inputs

Values = NDArray[np.float64]
#: The kernels' names of the exact and the approximate form (Hendrycks and Gimpel, 2016).
_FORMS = {
    "GeluExact": lambda x: 0.5 * x * special.erfc(-x / np.sqrt(2)),
    "GeluApproximate": lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
}
_COMPUTES = {
    "Add": np.add,
    "AddV2": np.add,
    "Mul": np.multiply,
    "Sub": np.subtract,
    "RealDiv": np.divide,
    "Pow": np.power,
    "Square": np.square,
    "Neg": np.negative,
    "Erf": special.erf,
    "Erfc": special.erfc,
    "Tanh": np.tanh,
}
#: No spelling takes more ops.
_MOST_OPS = 12
_POINTS = np.linspace(-6, 6, 97)


def find_gelu(graph: TensorGraph, consumers: Consumers, start: str) -> Step[str, str] | None:
    """The GELU that is all that reads a tensor; None where something else does.

    The ops behind the tensor are followed until one tensor is left that everything flows into,
    and computed on a few points: how the formula is written does not matter.
    """
    values: dict[str, Values] = {start: _POINTS}
    while len(values) <= _MOST_OPS:
        found = _next_computable(graph, consumers, values)
        if found is None:
            return None
        last, arguments = found
        with np.errstate(all="ignore"):
            values[last] = np.asarray(_COMPUTES[graph.nodes[last].op](*arguments))
        inner = [name for name in values if name != last]
        if all(reader in values for name in inner for reader, _ in consumers[name]):
            for kind, form in _FORMS.items():
                if _same(form(_POINTS), values[last]):
                    return Step(kind, tuple(values)[1:])
    return None


def _same(one: Values, other: Values) -> bool:
    # Constants are float32; the two forms differ by up to 5e-4.
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-5))


def _next_computable(
    graph: TensorGraph, consumers: Consumers, values: Mapping[str, Values]
) -> tuple[str, list[Values]] | None:
    """A node that reads nothing but known values and single numbers, with what it reads."""
    for name in values:
        for reader, _ in consumers[name]:
            if reader in values or graph.nodes[reader].op not in _COMPUTES:
                continue
            tensors = data_inputs(graph.nodes[reader])
            read = [values[t] if t in values else _number(graph, t) for t in tensors]
            known = [value for value in read if value is not None]
            if len(known) == len(read):
                return reader, known
    return None


def _number(graph: TensorGraph, tensor: str) -> Values | None:
    value = graph.constant(tensor)
    return value.reshape(()).astype(np.float64) if value is not None and value.size == 1 else None
