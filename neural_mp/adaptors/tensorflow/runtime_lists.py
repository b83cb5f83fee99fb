"""The runtime's own lists of what is safe, unsafe or indifferent in 16 bits, read from itself.

TensorFlow keeps them in C++ (`auto_mixed_precision_lists.h`) and writes them to a file when its
pass runs with a log folder set: so a graph of one product is sent through the pass.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.runtime import offline_passes
from neural_mp.adaptors.tensorflow.tensor_graph import GraphDef, make_constant, make_node
from neural_mp.amp import FourLists
from neural_mp.core.precision import Precision

logger = logging.getLogger(__name__)

#: What the variables begin with that TensorFlow's pass reads.
PREFIX = "TF_AUTO_MIXED_PRECISION_GRAPH_REWRITE_"
#: The pass of each type, and what it wants set to work on a machine without a GPU.
PASSES: Mapping[Precision, tuple[str, Mapping[str, str]]] = {
    Precision.BF16: ("auto_mixed_precision_onednn_bfloat16", {}),
    Precision.FP16: ("auto_mixed_precision", {f"{PREFIX}SIMULATE_GPU": "true"}),
}


@cache
def runtime_lists(precision: Precision) -> FourLists | None:
    """The defaults of the TensorFlow that is installed; None where it does not tell."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            run_pass(_product(), precision, ["x"], ["y"], {f"{PREFIX}LOG_PATH": folder})
        except (tf.errors.OpError, ValueError):
            logger.warning("TensorFlow's pass for %s does not run", precision, exc_info=True)
        files = sorted(Path(folder).glob("paintbuckets*"))
        text = files[0].read_text(encoding="utf-8") if files else ""
    return _parsed(text) if text else None


def run_pass(
    graph: GraphDef,
    precision: Precision,
    inputs: Iterable[str],
    outputs: Iterable[str],
    variables: Mapping[str, str] | None = None,
) -> GraphDef:
    """Let TensorFlow's own mixed precision pass rewrite a graph.

    Args:
        graph: the graph, which stays as it is.
        precision: BF16, or FP16 as on a GPU.
        inputs: tensors fed.
        outputs: tensors fetched, whose nodes the pass leaves alone.
        variables: further settings, in the environment's words.

    Raises:
        tf.errors.OpError: the pass refuses the graph.
    """
    name, wanted = PASSES[precision]
    with _environment({**wanted, **(variables or {})}):
        return offline_passes(graph, [name], inputs, outputs)


def _product() -> GraphDef:
    return GraphDef(
        node=[
            make_node("Placeholder", "x", dtype=tf.float32),
            make_constant("w", np.ones((4, 4), np.float32)),
            make_node("MatMul", "m", ["x", "w"], T=tf.float32),
            make_node("Identity", "y", ["m"], T=tf.float32),
        ]
    )


def _parsed(text: str) -> FourLists:
    lists: dict[str, set[str]] = {}
    current: set[str] = set()
    for line in text.splitlines():
        if line.endswith(":"):
            current = lists.setdefault(line[:-1].lower().removesuffix("list").strip(), set())
        elif line.strip():
            current.add(line.strip())
    return FourLists(
        **{key: frozenset(lists.get(key, ())) for key in ("allow", "deny", "infer", "clear")}
    )


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for a while; the user's own settings of the pass are put aside."""
    touched = {key for key in os.environ if key.startswith(PREFIX)} | set(values)
    before = {key: os.environ.pop(key) for key in touched if key in os.environ}
    os.environ.update(values)
    try:
        yield
    finally:
        for key in values:
            os.environ.pop(key, None)
        os.environ.update(before)
