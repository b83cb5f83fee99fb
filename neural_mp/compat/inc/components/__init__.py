"""What names in tuning files of Intel Neural Compressor stand for.

There, a name means what the framework of the model makes of it: `Resize: 256` is the shorter edge
for PyTorch and a square elsewhere. What is not listed for a framework means what it means in our
own files.
"""

from __future__ import annotations

from functools import cache

from neural_mp.compat.inc.components import (  # noqa: F401  (they register what they define)
    bert,
    coco,
    dummy,
    glue,
    imagenet,
    metrics_arrays,
    metrics_detection,
    metrics_text,
    mnist,
    records,
    transforms,
)
from neural_mp.compat.inc.components.registries import DATASETS, METRICS, TRANSFORMS
from neural_mp.data import Vocabulary


@cache
def vocabulary(framework: str | None) -> Vocabulary:
    """The names of a file.

    Args:
        framework: `pytorch`, `tensorflow` or `onnxrt`, whatever the file calls it; None for what
            all of them have.
    """
    return Vocabulary(DATASETS[framework], TRANSFORMS[framework], METRICS[framework])
