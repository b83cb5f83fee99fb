"""The transforms of their files, by framework; each module registers its own."""

from neural_mp.compat.inc.components.transforms import (  # imported to be registered
    detection,
    geometry,
    imagenet,
    labels,
    records,
    squad,
    torchvision_colour,
    torchvision_geometry,
    values,
)

__all__ = [
    "detection",
    "geometry",
    "imagenet",
    "labels",
    "records",
    "squad",
    "torchvision_colour",
    "torchvision_geometry",
    "values",
]
