"""Runs of LiteRT's interpreter, and the ops that its delegate, XNNPACK, runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter

from neural_mp.adaptors.common.threads import get_allowed_threads
from neural_mp.errors import ConversionError, one_line
from neural_mp.util.pytree import Array


@dataclass(eq=False)
class Runner:
    """An interpreter of one graph, for one call at a time; further threads wait.

    Attributes:
        content: the flatbuffer.
        inputs: tensors of the inputs, by position in the main subgraph.
        fetched: tensors to return, by position; others than the outputs need `keeps_tensors`.
        keeps_tensors: whether the memory of intermediate results is kept until the next run.
    """

    content: bytes
    inputs: Sequence[int]
    fetched: Sequence[int]
    keeps_tensors: bool = False
    _threads: int = field(default_factory=lambda: get_allowed_threads() or os.cpu_count() or 1)
    _lock: Lock = field(default_factory=Lock)
    _interpreter: Any = None
    _process: int = 0
    _shapes: tuple[tuple[int, ...], ...] = ()

    def __call__(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the fetched tensors of a run.

        Raises:
            ConversionError: the runtime rejects the graph, or the sizes of the inputs.
        """
        with self._lock:
            try:
                return self._run_arrays(arrays)
            except (RuntimeError, ValueError) as error:
                self._interpreter = None  # half resized
                raise ConversionError(f"LiteRT cannot run the model: {one_line(error)}") from error

    def _run_arrays(self, arrays: Sequence[Array]) -> list[Array]:
        # Threads of an interpreter do not outlive a fork.
        # LiteRT 2.3 keeps wrong results of a second run if a graph has results of free sizes.
        is_spent = self.keeps_tensors and bool(self._shapes)
        if self._interpreter is None or self._process != os.getpid() or is_spent:
            self._interpreter = make_interpreter(self.content, self._threads, self.keeps_tensors)
            self._process, self._shapes = os.getpid(), ()
        interpreter = self._interpreter
        shapes = tuple(np.shape(array) for array in arrays)
        if shapes != self._shapes:
            for index, shape in zip(self.inputs, shapes, strict=True):
                interpreter.resize_tensor_input(index, shape)
            interpreter.allocate_tensors()
            self._shapes = shapes
        for index, array in zip(self.inputs, arrays, strict=True):
            interpreter.set_tensor(index, array)
        interpreter.invoke()
        return [interpreter.get_tensor(index) for index in self.fetched]


def make_interpreter(content: bytes, threads: int, keeps_tensors: bool = False) -> Any:
    """Return an interpreter without allocated tensors."""
    with warnings.catch_warnings():
        # Keeping all tensors takes memory, and is meant.
        warnings.simplefilter("ignore", UserWarning)
        return Interpreter(
            model_content=content,
            num_threads=threads,
            experimental_preserve_all_tensors=keeps_tensors,
        )


_DELEGATE = "DELEGATE"


def find_undelegated(content: bytes) -> frozenset[int]:
    """Return the positions in the main subgraph of the ops that no delegate runs.

    The sizes of tensors are those of the file, which is checked. Ops whose results nobody reads
    count as not delegated.

    Raises:
        ConversionError: LiteRT rejects the model.
    """
    try:
        # One node for each op instead of one for all that are together.
        interpreter = Interpreter(
            model_content=content,
            num_threads=1,
            experimental_disable_delegate_node_fusion=True,
        )
        interpreter.allocate_tensors()
    except (RuntimeError, ValueError) as error:
        raise ConversionError(f"LiteRT cannot load the model: {one_line(error)}") from error
    # No public function returns the nodes.
    nodes = interpreter._get_ops_details()
    delegated = {
        tensor for node in nodes if node["op_name"] == _DELEGATE for tensor in node["outputs"]
    }
    return frozenset(
        node["index"]
        for node in nodes
        if node["op_name"] != _DELEGATE and delegated.isdisjoint(node["outputs"])
    )
