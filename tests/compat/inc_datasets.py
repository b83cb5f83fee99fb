"""Datasets of Intel Neural Compressor, by name."""

import numpy as np

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.data import build_dataset


def dataset(framework, name, **options):
    return build_dataset({name: options}, load_vocabulary(framework))


def pixels(seed, *shape):
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
