"""The representation of an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signature import Array, Signature
from neural_mp.adaptors.common.threads import allowed_threads
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, structure
from neural_mp.adaptors.onnxrt.sessions import CPU, Runner
from neural_mp.errors import ModelLoadError


@dataclass(frozen=True)
class Origin:
    """The files of weights that were not loaded, with their initial state.

    Attributes:
        folder: the base folder of external data.
        files: file → its size in bytes and its modification time in ns.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, folder: Path, program: ir.Model) -> Origin | None:
        """Return the files with the weights of a graph; None if all weights are in memory.

        Raises:
            ModelLoadError: a file is missing or outside of the folder.
        """
        names = {
            str(value.const_value.location)
            for value in program.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        root = folder.resolve()
        for name in names:
            # Some versions of ONNX Runtime accept such paths.
            if not (root / name).resolve().is_relative_to(root):
                raise ModelLoadError(
                    f"weight file {name!r} must be inside the folder of the model, "
                    f"{str(folder)!r}; move the file into that folder"
                )
        return cls(folder, {name: _state(folder / name) for name in names}) if names else None

    def check(self) -> None:
        """Check that the weight files are unchanged.

        Raises:
            ModelLoadError: a file was changed.
        """
        for name, state in self.files.items():
            if _state(self.folder / name) != state:
                raise ModelLoadError(
                    f"weight file {str(self.folder / name)!r} changed after the model was loaded; "
                    f"load the model again"
                )


def _state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        raise ModelLoadError(
            f"weight file {str(file)!r} does not exist; put the file into the folder of the model"
        ) from None
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A graph that ONNX Runtime runs.

    Attributes:
        program: the graph for planning: canonicalized, or converted.
        signature: the inputs and outputs.
        example: name → array, inputs for a run.
        given: the user's graph; None for a converted model.
        origin: the files of weights that were not loaded.
        ops: for a converted model, node → the op of the unconverted graph that its time counts
            towards, if the names differ.
        results: for a converted model, op of the unconverted graph → location of its result; ops
            fused into others have none.
        warnings: notes to the user.
        counts: the inserted conversions.
        opset: the ai.onnx opset of the canonicalized graph.
        obstacle: the reason why nothing can be converted, if any.
        provider: the execution provider to run the model.
        held: an object that must live as long as the model.
    """

    program: ir.Model
    signature: Signature
    example: dict[str, Array]
    given: ir.Model | None
    origin: Origin | None = None
    ops: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    opset: int = 0
    obstacle: str | None = None
    provider: str = CPU
    held: Any = None
    _runners: dict[int | None, Runner] = field(default_factory=dict)

    @property
    def runs(self) -> ir.Model:
        """The graph to run: the user's own, unless converted."""
        return self.program if self.given is None else self.given

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        return structure(self.program)

    @property
    def folder(self) -> Path | None:
        """The folder of external data."""
        return self.origin.folder if self.origin is not None else None

    def session(self, program: ir.Model, **settings: Any) -> Runner:
        """Return a session of a graph that shares the weights of this model."""
        if self.origin is not None:
            self.origin.check()
        return Runner(program, self.folder, self.provider, **settings)

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the outputs, in the order of the signature."""
        threads = allowed_threads()
        if threads not in self._runners:
            self._runners[threads] = self.session(self.runs)
        return self._runners[threads](feeds, self.signature.output_tensors)
