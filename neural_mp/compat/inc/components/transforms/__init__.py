"""Transforms of INC's files, by framework; each module registers its own."""

from neural_mp.compat.inc.components.transforms import (  # imported to register their classes
    geometry,
    imagenet,
    squad,
    torchvision,
    values,
)

__all__ = ["geometry", "imagenet", "squad", "torchvision", "values"]
