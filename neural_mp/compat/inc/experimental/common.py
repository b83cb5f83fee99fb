"""`experimental.common`: a model, a metric, a loader and a postprocess by their names."""

from __future__ import annotations

from neural_mp.compat.inc.given import DataLoader, Metric, Postprocess
from neural_mp.compat.inc.model import Model

__all__ = ["DataLoader", "Metric", "Model", "Postprocess"]
