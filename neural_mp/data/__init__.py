"""Datasets, transforms and the loader that YAML can name under `dataloader:`."""

from neural_mp.data import (  # import registers their names
    choices,
    detection,
    image_masks,
    images,
    numpy_files,
    text,
)
from neural_mp.data.datasets import DATASETS, ArrayDataset, DummyDataset
from neural_mp.data.loader import OWN, Vocabulary, build_dataloader, build_dataset, build_transforms
from neural_mp.data.registry import Registry
from neural_mp.data.transforms import TRANSFORMS, InputTransform, Transform

__all__ = [
    "DATASETS",
    "OWN",
    "TRANSFORMS",
    "ArrayDataset",
    "DummyDataset",
    "InputTransform",
    "Registry",
    "Transform",
    "Vocabulary",
    "build_dataloader",
    "build_dataset",
    "build_transforms",
    "choices",
    "detection",
    "image_masks",
    "images",
    "numpy_files",
    "text",
]
