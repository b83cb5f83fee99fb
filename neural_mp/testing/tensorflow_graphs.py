"""Seeded TensorFlow graphs of an op between two kernels, over the attributes that the op allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from neural_mp.testing.tensorflow_ops import EVERYWHERE, ON_IMAGES, Draw, drawn_kernel
from neural_mp.util.pytree import Array

SAMPLES = 3
#: Attributes that an op refuses together are drawn again, at most so often.
_MOST_DRAWS = 50
#: Sizes of tensors between the kernels.
_MOST_ELEMENTS = 1 << 15


@dataclass(frozen=True)
class TensorFlowGraph:
    """A drawn graph.

    Attributes:
        graph: the nodes, from the placeholder `x` to the output `y`.
        kind: op between the kernels.
        feeds: input of the calibration.
        words: the drawn ops with their attributes.
    """

    graph: tf.Graph
    kind: str
    feeds: Array
    words: str

    def __str__(self) -> str:
        return self.words


def _draw_last_kernel(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    """Return the result of a kernel, on a matrix if a tensor has another rank or unknown sizes."""
    if x.shape.rank == 4 and None not in x.shape[1:]:
        return drawn_kernel(draw, x)
    if x.shape.rank in (2, 3) and x.shape[-1] is not None:
        return drawn_kernel(draw, x)
    width = next((size for size in list(x.shape)[::-1] if size is not None), 1)
    return drawn_kernel(draw, tf.reshape(x, [-1, width]))


def drawn_graph(seed: int, kind: str | None = None) -> TensorFlowGraph:
    """Return a graph of an op, of the given kind or any, between two kernels.

    Raises:
        ValueError: no drawn attributes are valid.
    """
    random = np.random.default_rng(seed)
    everywhere, on_images = list(EVERYWHERE), list(ON_IMAGES)
    kind = kind or str(random.choice([*everywhere, *on_images]))
    for _ in range(_MOST_DRAWS):
        candidate = _draw_graph(Draw(random), kind)
        if candidate is not None:
            return candidate
    raise ValueError(f"{kind} must have valid attributes in {_MOST_DRAWS} draws, got none")


def _draw_graph(draw: Draw, kind: str) -> TensorFlowGraph | None:
    """Return a graph, or None if TensorFlow refuses the drawn attributes."""
    image = [draw.integer(4, 9), draw.integer(4, 9), draw.one_of(3, 4, 8)]
    shape = draw.one_of(image, image, [8]) if kind in EVERYWHERE else image
    if shape is image and kind in EVERYWHERE and draw.integer(0, 4) == 0:
        shape = image[1:]
    feeds = draw.floats(SAMPLES, *shape)
    op = EVERYWHERE.get(kind) or ON_IMAGES[kind]
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, *shape], name="x")
        try:
            y = op(draw, drawn_kernel(draw, x))
            if 0 in y.shape or (y.shape.num_elements() or 0) > _MOST_ELEMENTS:
                return None
            tf.identity(_draw_last_kernel(draw, y), name="y")
            with tf.compat.v1.Session() as session:
                output = session.run("y:0", {"x:0": feeds})
        except (ValueError, tf.errors.OpError):
            return None
    if not output.size or not np.isfinite(output).all():
        return None
    return TensorFlowGraph(graph, kind, feeds, _describe_graph(graph))


def _describe_graph(graph: tf.Graph) -> str:
    skipped = ("Const", "Placeholder", "Identity")
    operations = [
        operation for operation in graph.get_operations() if operation.type not in skipped
    ]
    return ", ".join(map(_describe_operation, operations))


def _describe_operation(operation: tf.Operation) -> str:
    parts = [str(tensor.shape.as_list()) for tensor in operation.inputs[:1]]
    parts += [str(value.tolist()) for value in _static_integers(operation.inputs[1:])]
    for name in ("ksize", "strides", "padding", "explicit_paddings", "dilations", "alpha", "mode"):
        if name in operation.node_def.attr:
            parts.append(f"{name}={operation.get_attr(name)}")
    return f"{operation.type}({', '.join(parts)})"


def _static_integers(inputs: Sequence[tf.Tensor]) -> list[Array]:
    values = [tf.get_static_value(tensor) for tensor in inputs if tensor.dtype.is_integer]
    return [value for value in values if value is not None]
