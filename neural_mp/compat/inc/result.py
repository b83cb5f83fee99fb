"""What their `fit` gives back: a model that can be saved, looked into and run."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.compat.inc.model import Tuned, graph_def_of
from neural_mp.errors import ConfigurationError

logger = logging.getLogger(__name__)


class Result(Tuned):
    """An `OptimizedModel` under their names; all else is looked up in it, then in its model."""

    def __init__(self, optimized: OptimizedModel) -> None:
        super().__init__(optimized)
        if optimized.met is False:
            logger.warning(
                "no plan met the accuracy target; what comes back is the FP32 model, where theirs "
                "would be None"
            )

    @property
    def graph_def(self) -> Any:
        """The graph of a TensorFlow model, frozen.

        Raises:
            ConfigurationError: it is a model of another framework.
        """
        return graph_def_of(self.model)

    def nodes(self) -> Any:
        """The nodes of an ONNX model's graph.

        Raises:
            ConfigurationError: it is a model of another framework.
        """
        graph: Any = getattr(self.model, "graph", None)
        if not hasattr(graph, "node"):
            raise ConfigurationError(
                f"nodes() is for ONNX models; this is one of {self.optimized.framework}"
            )
        return graph.node

    def framework(self) -> str:
        """The framework's name."""
        return self.optimized.framework

    def save(self, path: str | Path | None = None) -> None:
        """Save the model: into a folder, or, for `.onnx`, `.pb` and `.pbtxt`, into a file.

        Args:
            path: where; `nc_workspace/saved` by default.
        """
        self.optimized.save(path or Path("nc_workspace") / "saved")

    def export(self, path: str | Path, conf: Any = None) -> None:
        """Write the model as an ONNX file.

        Args:
            path: the file.
            conf: taken for their sake; the file holds the model as it is.
        """
        self.optimized.export_onnx(path)

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the model, as the framework's own object where that can be called."""
        run = self.model if callable(self.model) else self.optimized
        return run(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "optimized":
            raise AttributeError(name)
        for holder in (self.optimized, self.model):
            if hasattr(holder, name):
                return getattr(holder, name)
        raise AttributeError(
            f"neither the result nor its {self.optimized.framework} model has {name!r}"
        )

    def __repr__(self) -> str:
        return repr(self.optimized)
