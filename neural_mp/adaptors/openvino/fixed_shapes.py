"""Models of dynamic shape, compiled for the shapes of their example as well."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from threading import Lock
from typing import Any

from neural_mp.adaptors.openvino.ops import traits_of
from neural_mp.adaptors.openvino.runtime import Runner, ov
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

logger = logging.getLogger(__name__)

#: Shape of each input, in the order of the model.
Shapes = tuple[tuple[int, ...], ...]


class ShapedRunner:
    """Run a model as compiled for the shapes of its example, and as it is for other shapes.

    Kernels of a fixed shape take 1 to 3 % less time: nothing is inferred or looked up in a call.
    They round differently, so the form follows from the shapes of a call alone, never from earlier
    calls. Each form is compiled at its first call.

    Args:
        model: the `openvino.Model`.
        example: the shapes.
        streams: as for `Runner`.
        rounds: whether casts to bfloat16 must round: those of the user, not of a plan.
    """

    def __init__(
        self, model: Any, example: Shapes, *, streams: int | None = None, rounds: bool = True
    ) -> None:
        self._model, self._streams = model, streams
        self._example = example if _may_be_fixed(model, rounds) else None
        self._fixed: Runner | None = None
        self._dynamic: Runner | None = None
        self._lock = Lock()

    def __call__(self, feeds: Sequence[Array]) -> list[Array]:
        """Return all outputs for inputs in the order of the model.

        Raises:
            ConversionError: OpenVINO rejects the model, or a kernel fails.
        """
        with self._lock:
            as_example = tuple(value.shape for value in feeds) == self._example
            runner = self._for_example() if as_example else self._for_all()
        return runner(feeds)

    def _for_example(self) -> Runner:
        if self._fixed is None or not self._fixed.is_usable:
            try:
                model = self._model.clone()
                model.reshape(dict(enumerate(self._example or ())))
                self._fixed = Runner(model, streams=self._streams)
            except (ConversionError, RuntimeError):
                # A graph may hold sizes of its own; errors of the user's call come from the
                # dynamic form.
                logger.debug("not compiled for %s", self._example, exc_info=True)
                self._fixed = self._for_all()
        return self._fixed

    def _for_all(self) -> Runner:
        if self._dynamic is None or not self._dynamic.is_usable:
            self._dynamic = Runner(self._model, streams=self._streams)
        return self._dynamic


def _may_be_fixed(model: Any, rounds: bool) -> bool:
    """Whether the model of a fixed shape computes the same up to the order of sums.

    With states, loops and attention with a cache, results differed (OpenVINO 2026.4); between casts
    to bfloat16, the plugin keeps float32 where shapes are fixed.
    """
    nodes = model.get_ordered_ops()
    if not model.is_dynamic() or model.get_sinks():
        return False
    types = {port.get_element_type() for node in nodes for port in node.outputs()}
    has_casts = rounds and any(dtype == ov.Type.bf16 for dtype in types)
    return not has_casts and not any(traits_of(node).dynamic_only for node in nodes)
