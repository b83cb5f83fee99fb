"""The contract of an adaptor: all that knows a framework, and nothing that chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from neural_mp.adaptors.common.channel_scaling import Layer, LayerChange
from neural_mp.amp import FourLists, canonical_lists
from neural_mp.core.byte_products import ByteProducts, KernelKind
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError
from neural_mp.space.space import Capability, TuningSpace

#: How the graph of a model may be found.
CAPTURES = ("whole", "modules")
#: A model as an adaptor holds it; opaque to everyone else.
Model = Any


@dataclass(frozen=True)
class ConversionCounts:
    """How many conversions a model makes on every run."""

    casts: int = 0
    quantize: int = 0
    dequantize: int = 0


class Adaptor(ABC):
    """A framework.

    An adaptor never chooses a precision and never evaluates accuracy. Conversion is
    deterministic: the same model, plan and observations give the same result.
    """

    framework: ClassVar[str]
    #: Endings of the single files that `save_file` writes.
    file_suffixes: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` (object or path) looks like a model of this framework.

        Must answer without importing the framework.
        """

    @abstractmethod
    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: str = "whole",
    ) -> Model:
        """Take in a model, from a path or as the framework's object; the object stays untouched.

        Args:
            source: what the user gave.
            inputs: names of the inputs, or example inputs, as the user gave them.
            outputs: names of the outputs to keep.
            example: the inputs of one batch, where data is at hand.
            capture: `modules` takes a model in whose code there is no single graph to be found
                apart into modules that have one; for frameworks whose models are code.

        Raises:
            ModelLoadError: it cannot be read, or not without running code from a file.
            CaptureError: its graph cannot be captured.
        """

    def copied(self, model: Model) -> Model | None:
        """A model that can be sent to another process as it is; None where it is loaded anew there.

        For frameworks that do not name the ops of a model alike whenever it is loaded.
        """
        return None

    @abstractmethod
    def graph(self, model: Model) -> OpGraph:
        """Every op, its type, its data edges."""

    @abstractmethod
    def capabilities(self, model: Model, hardware: Hardware) -> Mapping[str, Capability]:
        """What every op of the model can really run in on this hardware, asked of the runtime."""

    def kernel_products(self, hardware: Hardware) -> Mapping[KernelKind, ByteProducts]:
        """How the integer kernels multiply bytes on the machine that is converted for.

        By the flags of its CPU; a framework whose runtime can be asked is asked.
        """
        return dict.fromkeys(KernelKind, hardware.byte_products)

    def wide_kernels(self, model: Model) -> frozenset[KernelKind]:
        """The kinds of a model's integer kernels that are right only where products are exact.

        Those with weights beyond ±63; none by default.
        """
        return frozenset()

    def right_everywhere(self, model: Model) -> Model:
        """A converted model with weights that are right on every processor.

        Raises:
            ConversionError: that cannot be made of the model.
        """
        raise ConversionError(f"{self.framework} models cannot be written anew for this processor")

    @abstractmethod
    def op_types(self) -> Collection[str]:
        """Every op type that the framework has."""

    @abstractmethod
    def kinds(self) -> Mapping[str, Collection[str]]:
        """Kind of op (see `neural_mp.amp.KINDS`) → what the framework calls ops of that kind."""

    def amp_lists(self, precision: Precision) -> FourLists:
        """The four lists of a 16-bit precision, by the framework's op types, before any edits."""
        return canonical_lists(precision).translated(self.kinds())

    @abstractmethod
    def observe(self, model: Model, batches: Iterable[Any], space: TuningSpace) -> Observations:
        """One pass over calibration inputs, in memory that does not grow with their number."""

    @abstractmethod
    def convert(
        self, model: Model, plan: PrecisionPlan, observations: Observations, space: TuningSpace
    ) -> Model:
        """The model in the precisions of the plan; the model given is untouched.

        Raises:
            ConversionError: a quantized tensor was never observed, or the framework refuses.
        """

    def layers(self, model: Model) -> Mapping[str, Layer]:
        """Op → its constants, of layers and normalizations that can be repaired; none by default.

        Layers are those with INT8 kernels and a weight; weights are read only when asked for.
        """
        return {}

    def with_layers(self, model: Model, changes: Mapping[str, LayerChange]) -> Model:
        """The model with other constants in some of its `layers`; the model given is untouched."""
        raise ConversionError(f"{self.framework} models have no layers that can be repaired")

    def channel_keepers(self, model: Model) -> Collection[str]:
        """The ops that only move values, and leave every channel where it is; none by default."""
        return ()

    @abstractmethod
    def predict(self, model: Model, inputs: Any) -> Any:
        """Run one batch. Outputs come as numpy arrays where the inputs were numpy arrays."""

    @abstractmethod
    def example_inputs(self, model: Model, batch_size: int | None = None) -> Any:
        """Inputs the model can be run on, as `predict` takes them: those it was captured with.

        Args:
            model: the model.
            batch_size: repeat or cut the first axis to this length.
        """

    @abstractmethod
    def native(self, model: Model) -> Any:
        """The framework's own object."""

    @abstractmethod
    def profile(self, model: Model, inputs: Any) -> Mapping[str, float]:
        """Op → seconds of one run."""

    def hessian_traces(
        self, model: Model, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """Op → trace of the Hessian by its weight, of the loss in `adaptors.common.hessian`.

        Raises:
            ConversionError: the framework has no gradients.
        """
        raise ConversionError(
            f"{self.framework} has no gradients, which hawq_v2 needs; choose another strategy"
        )

    @abstractmethod
    def conversion_counts(self, model: Model) -> ConversionCounts:
        """The casts, quantizations and dequantizations of one run."""

    @abstractmethod
    def size(self, model: Model) -> int:
        """Bytes the weights take."""

    @abstractmethod
    def fingerprint(self, model: Model) -> str:
        """A digest of the ops and weights: equal for equal models, also in another process."""

    @abstractmethod
    def first_non_finite(self, model: Model, inputs: Any) -> str | None:
        """The first op whose result holds NaN or Inf; None if there is none."""

    @abstractmethod
    def save(self, model: Model, path: Path) -> None:
        """Write the model into the (existing, empty) folder `path`."""

    def save_file(self, model: Model, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the model alone into a file of one of the `file_suffixes`.

        Args:
            model: the model.
            path: the file; what does not fit goes into files beside it.
            metadata: what is said of the model in the file, where such files have room for that.

        Raises:
            ConversionError: the framework has no such files.
        """
        raise ConversionError(f"{self.framework} models are saved in folders, not in single files")

    @abstractmethod
    def draw(self, model: Model, path: Path) -> tuple[Path, ...]:
        """Write the graph for people to look at: in the framework's binary form, and as text.

        Args:
            model: the model.
            path: the files, without an ending. The text leaves large weights out.

        Returns:
            The files written.
        """

    def compiled(self, model: Model) -> Any:
        """The framework's own object, run through its compiler.

        Raises:
            ConversionError: the framework has none.
        """
        raise ConversionError(f"{self.framework} has no compiler that models are run through")

    def export_onnx(self, model: Model, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the model as an ONNX file, with `metadata` among its properties.

        Raises:
            ConversionError: the framework or the model has no way to ONNX.
        """
        raise ConversionError(f"{self.framework} models cannot be written as ONNX")

    @abstractmethod
    def restore(self, path: Path) -> Model:
        """Read back what `save` wrote; never runs code from a file.

        Raises:
            ModelLoadError: the files are missing, truncated or tampered with.
        """

    def threads(self, count: int | None) -> AbstractContextManager[None]:
        """For a while, let the framework use `count` threads; None leaves it as it is."""
        return nullcontext()

    def space(
        self,
        model: Model,
        hardware: Hardware,
        lists: Mapping[Precision, FourLists] | None = None,
    ) -> TuningSpace:
        """The graph with the capabilities of every op.

        Args:
            model: the model.
            hardware: the machine.
            lists: the four lists of the 16-bit precisions; the framework's own by default.
        """
        if lists is None:
            lists = {p: self.amp_lists(p) for p in Precision if p.is_16_bit}
        return TuningSpace(self.graph(model), self.capabilities(model, hardware), lists)
