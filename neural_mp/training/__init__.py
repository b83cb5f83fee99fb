"""Mixed precision while a model is trained, and in programs that are not converted."""

from neural_mp.training.graph_rewrite import (
    disable_graph_rewrite,
    enable_graph_rewrite,
    graph_rewrite,
)

__all__ = ["disable_graph_rewrite", "enable_graph_rewrite", "graph_rewrite"]
