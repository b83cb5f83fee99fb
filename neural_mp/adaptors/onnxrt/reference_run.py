"""Runs of the original graph, which every rewriting of a model is compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.example_inputs import in_parts
from neural_mp.adaptors.common.signature import Array, Signature
from neural_mp.adaptors.onnxrt.sessions import Runner
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import float_arrays, tree_leaves

#: Samples on which a canonicalized graph is run next to the original.
_COMPARED_SAMPLES = 2
#: Largest difference of equal outputs, relative to their largest value.
_TOLERANCE = 1e-3
#: Largest noise, over the signal, of a model that is quantized already.
_MAX_SOURCE_NSR = 0.1
#: Relative change of inputs that only rounding would show.
_NUDGE_RATIO = 2.0**-20


@dataclass(frozen=True)
class Reference:
    """The results of the original graph on a few samples.

    Attributes:
        given: the original graph.
        feeds: the samples.
        outputs: the tensors to compare.
        results: their values; None if the original fails, e.g. on synthetic inputs.
    """

    given: ir.Model
    feeds: dict[str, Array]
    outputs: list[str]
    results: list[Any] | None

    @classmethod
    def of(
        cls, original: Runner, given: ir.Model, signature: Signature, feeds: dict[str, Array]
    ) -> Reference:
        """Run the original graph on the first samples of a batch."""
        few = next(in_parts(feeds, signature.samples(feeds), _COMPARED_SAMPLES))
        outputs = signature.output_tensors
        try:
            return cls(given, few, outputs, original(few, outputs))
        except ConversionError:
            return cls(given, few, outputs, None)

    def check(self, prepared: Runner, folder: Path | None, provider: str) -> None:
        """Check that a rewritten graph yields the same.

        Raises:
            ConversionError: the rewritten graph fails, or its outputs differ.
        """
        if self.results is None:
            return
        outputs = prepared(self.feeds, self.outputs)
        if not _are_close(outputs, self.results) and self._is_stable(folder, provider):
            raise ConversionError("the outputs differ")

    def is_near(self, bare: Runner) -> bool:
        """Whether a graph without the model's quantization yields the same, up to its noise."""
        if self.results is None:
            return True
        outputs = bare(self.feeds, self.outputs)
        for result, expected in zip(float_arrays(outputs), float_arrays(self.results), strict=True):
            error, signal = np.square(result - expected).sum(), np.square(expected).sum()
            if not error <= _MAX_SOURCE_NSR * signal:
                return False
        return True

    def _is_stable(self, folder: Path | None, provider: str) -> bool:
        """Whether the original graph yields the same after a change of rounding.

        Random ops never do, and a sorted or thresholded output may not.
        """
        nudged = {name: _nudged(array) for name, array in self.feeds.items()}
        optimized = Runner(self.given, folder, provider)
        return self.results is not None and _are_close(
            optimized(nudged, self.outputs), self.results
        )


def _are_close(actual: Any, expected: Any) -> bool:
    """Whether outputs agree, including the tensors within sequences and maps."""
    pairs = list(zip(tree_leaves(actual), tree_leaves(expected), strict=False))
    is_complete = len(pairs) == len(tree_leaves(actual)) == len(tree_leaves(expected))
    return is_complete and all(_is_close(np.asarray(a), np.asarray(b)) for a, b in pairs)


def _is_close(actual: Array, expected: Array) -> bool:
    """Whether two arrays agree up to rounding, relative to the largest value."""
    if actual.shape != expected.shape:
        return False
    if expected.dtype.kind not in "fV":  # bfloat16 is of kind V in numpy
        return bool(np.array_equal(actual, expected))
    output, target = actual.astype(np.float64), expected.astype(np.float64)
    largest = np.abs(target, where=np.isfinite(target), out=np.zeros_like(target)).max(initial=0.0)
    return np.allclose(output, target, _TOLERANCE, _TOLERANCE * largest, equal_nan=True)


def _nudged(value: Any) -> Any:
    """Return floats changed in their last bits; other inputs unchanged."""
    is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
    return value * value.dtype.type(1 + _NUDGE_RATIO) if is_float else value
