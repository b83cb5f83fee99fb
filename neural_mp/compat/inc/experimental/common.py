"""`experimental.common`: a model, a metric, a loader and a postprocess by their names."""

from __future__ import annotations

from neural_mp.compat.inc.model import Model
from neural_mp.compat.inc.user_objects import DataLoader, Metric, Postprocess

__all__ = ["DataLoader", "Metric", "Model", "Postprocess"]
