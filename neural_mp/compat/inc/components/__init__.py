"""Names that tuning files of Intel Neural Compressor (INC) use, with their meaning in INC.

In INC, a name depends on the model's framework: `Resize: 256` sets the shorter edge for PyTorch,
and a square elsewhere. Names not listed for a framework have the meaning of our own files.

Conventions of all classes and functions here, unless stated otherwise:

* ConfigurationError is raised for an invalid option; DataError for a missing or malformed file,
  record or sample; MetricError for predictions and labels that do not fit, and for a result
  without samples; MissingFrameworkError for a package that is not installed.
* The dataset options `filter` and `num_cores` have no effect; a warning names them if set.
* The method `apply` of a transform raises ValueError if the image does not fit.
"""

from __future__ import annotations

from functools import cache

from neural_mp.compat.inc.components import (  # noqa: F401  (imported to register their classes)
    dummy,
    image_datasets,
    metrics_arrays,
    metrics_detection,
    metrics_text,
    mnist,
    records,
    text_datasets,
    transforms,
)
from neural_mp.compat.inc.components.registries import DATASETS, METRICS, TRANSFORMS
from neural_mp.data import Vocabulary


@cache
def load_vocabulary(framework: str | None) -> Vocabulary:
    """Return the names available to a file.

    Args:
        framework: `pytorch`, `tensorflow` or `onnxrt`, not INC's spelling; None for the names
            common to all.
    """
    return Vocabulary(DATASETS[framework], TRANSFORMS[framework], METRICS[framework])
