"""Transforms of INC's files, by framework; each module registers its own."""

from neural_mp.compat.inc.components.transforms import (  # noqa: F401  (each registers its classes)
    geometry,
    imagenet,
    squad,
    torchvision,
    values,
)
