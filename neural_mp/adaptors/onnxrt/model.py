"""An ONNX model as the adaptor holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signature import Array, Signature
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, structure
from neural_mp.adaptors.onnxrt.sessions import CPU, Runner, allowed_threads
from neural_mp.errors import ModelLoadError


@dataclass(frozen=True)
class Origin:
    """Where weights lie that were not read: a folder, and its files as they were at first.

    Attributes:
        folder: what the places of external data are relative to.
        files: file → its size in bytes and the time it was last written.
    """

    folder: Path
    files: Mapping[str, tuple[int, int]]

    @classmethod
    def of(cls, folder: Path, program: ir.Model) -> Origin | None:
        """The files that the weights of a graph lie in; None where they all lie in memory.

        Raises:
            ModelLoadError: one of them is missing, or lies outside of the folder.
        """
        names = {
            str(value.const_value.location)
            for value in program.graph.initializers.values()
            if isinstance(value.const_value, ir.ExternalTensor)
        }
        root = folder.resolve()
        for name in names:
            # Not every version of ONNX Runtime refuses it.
            if not (root / name).resolve().is_relative_to(root):
                raise ModelLoadError(
                    f"the model reads weights from {name!r}, which lies outside of its folder "
                    f"{str(folder)!r}; put the file into that folder"
                )
        return cls(folder, {name: _state(folder / name) for name in names}) if names else None

    def check(self) -> None:
        """Make sure that the weights still lie where they did.

        Raises:
            ModelLoadError: a file was changed.
        """
        for name, state in self.files.items():
            if _state(self.folder / name) != state:
                raise ModelLoadError(
                    f"{str(self.folder / name)!r} was changed since the model was loaded from it; "
                    f"load it again"
                )


def _state(file: Path) -> tuple[int, int]:
    try:
        found = file.stat()
    except OSError:
        raise ModelLoadError(
            f"the model keeps weights in {str(file)!r}, which is missing; put it beside the model"
        ) from None
    return found.st_size, found.st_mtime_ns


@dataclass(frozen=True, eq=False)
class OnnxModel:
    """A graph that ONNX Runtime runs.

    Attributes:
        program: the graph everything is decided on: prepared, or converted.
        signature: the inputs and outputs.
        example: name → array, inputs it can be run on.
        given: of a model that was not converted, the graph as the user gave it.
        origin: where weights lie that were not read.
        ops: of a converted model, node that may run → the op of the untouched graph that its time
            counts for, where that has another name.
        results: of a converted model, op of the untouched graph → where its result is; ops that run
            within the kernel of another have none.
        warnings: what the user should know.
        counts: the conversions that were put in.
        opset: the version of the ai.onnx operators that the prepared graph is written in.
        obstacle: why nothing can be converted, if so.
        provider: the execution provider that runs it.
        held: what must not be thrown away as long as the model is used.
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
        """The graph that is run: the user's own, as long as nothing was converted."""
        return self.program if self.given is None else self.given

    @cached_property
    def structure(self) -> GraphStructure:
        """What the graph is made of."""
        return structure(self.program)

    @property
    def folder(self) -> Path | None:
        """Where external data lies."""
        return self.origin.folder if self.origin is not None else None

    def session(self, program: ir.Model, **settings: Any) -> Runner:
        """A session of a graph that shares this one's weights."""
        if self.origin is not None:
            self.origin.check()
        return Runner(program, self.folder, self.provider, **settings)

    def run(self, feeds: Mapping[str, Any]) -> list[Any]:
        """The outputs, in the order of the signature."""
        threads = allowed_threads()
        if threads not in self._runners:
            self._runners[threads] = self.session(self.runs)
        return self._runners[threads](feeds, self.signature.output_tensors)
