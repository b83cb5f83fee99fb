"""Inputs of a decoder for a number of tokens."""

from __future__ import annotations

from typing import Any

from neural_mp.errors import ConfigurationError
from neural_mp.util.pytree import structure_of, tree_leaves, unflatten


def with_tokens(inputs: Any, count: int) -> Any:
    """Return the inputs of a decoder for one sequence of this many tokens, repeated if needed.

    Raises:
        ConfigurationError: the inputs are not tokens.
    """
    leaves = tree_leaves(inputs)
    shapes = {tuple(getattr(leaf, "shape", ())) for leaf in leaves}
    if len(shapes) != 1 or any(len(shape) != 2 or 0 in shape for shape in shapes):
        raise ConfigurationError(
            f"workload requires a decoder whose inputs are tokens [batch, tokens], got inputs of "
            f"shapes {sorted(map(list, shapes))}; remove the workload"
        )

    structure, _ = structure_of(inputs)
    ((_, length),) = shapes
    order = [index % length for index in range(count)]
    return unflatten(structure, [leaf[:1][:, order] for leaf in leaves])
