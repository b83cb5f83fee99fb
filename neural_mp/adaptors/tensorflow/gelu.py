"""GELU as frameworks spell it out in elementary ops, recognised by what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

from neural_mp.adaptors.tensorflow.nodes import Consumers, TensorGraph, data_inputs

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


@dataclass(frozen=True)
class Gelu:
    """A GELU: the kernel's name of it, and its nodes, of which the last has the result."""

    kind: str
    nodes: tuple[str, ...]


def find_gelu(graph: TensorGraph, consumers: Consumers, start: str) -> Gelu | None:
    """The GELU that is all that reads a tensor; None where something else does.

    The ops behind the tensor are followed until one tensor is left that everything flows into,
    and computed on a few points: how the formula is written does not matter.
    """
    values: dict[str, NDArray[np.float64]] = {start: _POINTS}
    nodes: list[str] = []
    while len(nodes) < _MOST_OPS:
        following = _next_computable(graph, consumers, values, nodes)
        if following is None:
            return None
        with np.errstate(all="ignore"):
            values[following] = _compute(graph, following, values)
        nodes.append(following)
        inner = {start, *nodes[:-1]}
        closed = all(reader in nodes for name in inner for reader, _ in consumers[name])
        if closed:
            kind = next(
                (k for k, f in _FORMS.items() if _same(f(_POINTS), values[following])), None
            )
            if kind is not None:
                return Gelu(kind, tuple(nodes))
    return None


def _same(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    # Constants are float32; the two forms differ by up to 5e-4.
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=0, atol=1e-5))


def _next_computable(
    graph: TensorGraph,
    consumers: Consumers,
    values: Mapping[str, NDArray[np.float64]],
    nodes: list[str],
) -> str | None:
    """A node all of whose inputs are known: those values, or single numbers."""
    for name in values:
        for reader, _ in consumers[name]:
            if reader in values or graph.nodes[reader].op not in _COMPUTES:
                continue
            if all(
                t in values or _number(graph, t) is not None
                for t in data_inputs(graph.nodes[reader])
            ):
                return reader
    return None


def _number(graph: TensorGraph, tensor: str) -> float | None:
    value = graph.constant(tensor)
    return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None


def _compute(
    graph: TensorGraph, name: str, values: Mapping[str, NDArray[np.float64]]
) -> NDArray[np.float64]:
    node = graph.nodes[name]
    arguments = [values.get(tensor, _number(graph, tensor)) for tensor in data_inputs(node)]
    result: NDArray[np.float64] = np.asarray(_COMPUTES[node.op](*arguments))
    return result
