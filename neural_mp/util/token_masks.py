"""Tokens of a batch that count, by the `attention_mask` among its inputs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.util.pytree import convert_to_numpy

#: Name of a mask → names of the inputs whose tokens the mask covers.
_COVERED = {
    "attention_mask": ("input_ids", "inputs_embeds"),
    "decoder_attention_mask": ("decoder_input_ids", "decoder_inputs_embeds"),
}


@dataclass(frozen=True)
class TokenMasks:
    """Masks of a batch with tokens that do not count.

    Attributes:
        by_shape: (texts, tokens) → whether each token counts.
    """

    by_shape: Mapping[tuple[int, ...], NDArray[np.bool_]]

    def find_mask(self, shape: tuple[int, ...]) -> NDArray[np.bool_] | None:
        """Return which rows of values of this shape count, the last axis being that of values.

        None if all count, or their axes are neither (texts, tokens) nor (texts · tokens,).
        """
        rows = tuple(shape[:-1])
        if rows in self.by_shape:
            return self.by_shape[rows]
        flat = [mask.reshape(-1) for mask in self.by_shape.values() if (mask.size,) == rows]
        return flat[0] if len(flat) == 1 else None

    def find_part(self, shape: tuple[int, ...], first: int) -> NDArray[np.bool_] | None:
        """Return which rows of values of this shape count, of the texts from the `first` on.

        None if all count, or the axes of the rows are not (texts, tokens).
        """
        if len(shape) != 3:
            return self.find_mask(shape) if first == 0 else None
        end = first + shape[0]
        masks = [
            mask[first:end]
            for (texts, tokens), mask in self.by_shape.items()
            if tokens == shape[1] and end <= texts
        ]
        return masks[0] if len(masks) == 1 else None


def find_token_masks(inputs: object) -> TokenMasks:
    """Return the masks of a batch.

    Masks of an encoder and a decoder that differ for the same number of tokens are left out, as the
    shape of a tensor does not tell which covers its rows.
    """
    masks: defaultdict[tuple[int, ...], list[NDArray[np.bool_]]] = defaultdict(list)
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {}
    for name, covered in _COVERED.items():
        mask = named.get(name)
        tokens = next((named[key] for key in covered if named.get(key) is not None), None)
        shape = tuple(getattr(mask if mask is not None else tokens, "shape", ()))[:2]
        if len(shape) != 2 or len(getattr(mask, "shape", shape)) != 2:
            continue
        counts = np.ones(shape, bool) if mask is None else convert_to_numpy(mask) != 0
        masks[tuple(map(int, shape))].append(counts)
    return TokenMasks(
        {
            shape: same[0]
            for shape, same in masks.items()
            if all(np.array_equal(mask, same[0]) for mask in same) and not same[0].all()
        }
    )
