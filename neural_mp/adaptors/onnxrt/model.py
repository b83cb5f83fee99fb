"""The representation of an ONNX model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.common.graph_model import GraphModel, Run
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, structure
from neural_mp.adaptors.onnxrt.kernel_check import KernelCheck
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
        status = file.stat()
    except OSError:
        raise ModelLoadError(
            f"weight file {str(file)!r} does not exist; put the file into the folder of the model"
        ) from None
    return status.st_size, status.st_mtime_ns


@dataclass(frozen=True, eq=False)
class OnnxModel(GraphModel[ir.Model]):
    """A graph that ONNX Runtime runs.

    Attributes:
        origin: the files of weights that were not loaded.
        opset: the ai.onnx opset of the canonicalized graph.
        obstacle: the reason why nothing can be converted, if any.
        provider: the execution provider to run the model.
        held: an object that must live as long as the model.
        quantized: the canonicalized graph with the quantization of the given model; None if the
            given model is not quantized.
        kernel_check: the check of the ops between integer ops; None for a converted model, and for
            providers without a check.
    """

    origin: Origin | None = None
    opset: int = 0
    obstacle: str | None = None
    provider: str = CPU
    held: Any = None
    quantized: ir.Model | None = None
    kernel_check: KernelCheck | None = None

    @property
    def rejected(self) -> Mapping[str, str]:
        """Op → the reason why it cannot run between integer ops."""
        return {} if self.kernel_check is None else self.kernel_check.rejected

    @cached_property
    def structure(self) -> GraphStructure:
        """The structure of the graph."""
        return structure(self.program, self.rejected)

    @property
    def folder(self) -> Path | None:
        """The folder of external data."""
        return self.origin.folder if self.origin is not None else None

    @property
    def as_given(self) -> OnnxModel:
        """The model with the given quantization, of which `program` has only the ranges."""
        if self.given is None or self.quantized is None:
            return self
        return replace(self, program=self.quantized, quantized=None, _runners={})

    def session(self, program: ir.Model, **settings: Any) -> Runner:
        """Return a session of a graph that shares the weights of this model."""
        if self.origin is not None:
            self.origin.check()
        return Runner(program, self.folder, self.provider, **settings)

    def compiled(self) -> Run:
        """Return a session of the graph to run, for the allowed number of threads."""
        return self.session(self.runs).fetching(self.signature.output_tensors)
