"""The contract of an adaptor: all that knows a framework, and nothing that chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from neural_mp.adaptors.common import conversion
from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.adaptors.common.capabilities import OpKernels, built_capabilities
from neural_mp.adaptors.common.int8_accumulation import Products
from neural_mp.adaptors.common.optional import (
    Compiler,
    Corrections,
    Drawing,
    Hessian,
    KernelTrace,
    OnnxExport,
    OpOutputs,
    OpTiming,
    Portability,
    SingleFile,
)
from neural_mp.amp import FourLists, canonical_lists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.observations import Observations, Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.validators import non_negative_integer, record

#: A model as its adaptor holds it; nobody else looks into it, but for `warnings` and `counts`.
M = TypeVar("M")


@dataclass(frozen=True)
class ConversionCounts:
    """How many conversions a model makes on every run."""

    casts: int = 0
    quantize: int = 0
    dequantize: int = 0

    @classmethod
    def from_dict(cls, data: Any) -> ConversionCounts:
        """Read back the dict of its attributes; `NeuralMPError` where that is none."""
        others = dict.fromkeys(cls.__dataclass_fields__, non_negative_integer)
        return cls(**record({}, others)(data))


class Adaptor(ABC, Generic[M]):
    """A framework, generic in the model that it holds.

    A framework gives what only it knows: how to read, run, watch and write its models, and which
    kernels there are. The roads of a plan, of calibration and of capabilities are the same for all
    (`neural_mp.adaptors.common.conversion`), and end in these methods. All else is optional, and
    stands in `neural_mp.adaptors.common.optional`.

    A model may have `warnings`, what the user should know of how it was taken in, and `counts`, a
    `ConversionCounts`.

    An adaptor never chooses a precision and never evaluates accuracy. Conversion is deterministic:
    the same model, plan and observations give the same result.
    """

    framework: ClassVar[str]
    #: The packages whose versions decide what its models run like.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether `inputs` of `load` may be shapes, with None for axes that are to be free.
    frees_axes: ClassVar[bool] = False
    #: Kind of op (see `neural_mp.amp.KINDS`) → what the framework calls ops of that kind.
    op_kinds: ClassVar[Mapping[str, Collection[str]]] = {}

    # What a framework may offer besides; None where it does not
    op_timing: OpTiming[M] | None = None
    kernel_trace: KernelTrace[M] | None = None
    op_outputs: OpOutputs[M] | None = None
    corrections: Corrections[M] | None = None
    hessian: Hessian[M] | None = None
    portability: Portability[M] | None = None
    single_file: SingleFile[M] | None = None
    onnx_export: OnnxExport[M] | None = None
    compiler: Compiler[M] | None = None
    drawing: Drawing[M] | None = None

    # What every framework gives

    @abstractmethod
    def load(
        self,
        source: Any,
        *,
        inputs: Any = None,
        outputs: Any = None,
        example: Any = None,
        capture: Capture = Capture.WHOLE,
    ) -> M:
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

    @abstractmethod
    def graph(self, model: M) -> OpGraph:
        """Every op, its type, its data edges, its fusion group."""

    @abstractmethod
    def predict(self, model: M, inputs: Any) -> Any:
        """Run one batch. Outputs come as numpy arrays where the inputs were numpy arrays."""

    @abstractmethod
    def example_inputs(self, model: M, batch_size: int | None = None) -> Any:
        """Inputs the model can be run on, as `predict` takes them: those it was captured with.

        Args:
            model: the model.
            batch_size: repeat or cut the first axis to this length.
        """

    @abstractmethod
    def native(self, model: M) -> Any:
        """The framework's own object; of an untouched model, the user's own."""

    @abstractmethod
    def weight_bytes(self, model: M) -> int:
        """Bytes the weights take."""

    @abstractmethod
    def fingerprint(self, model: M) -> str:
        """A digest of the ops and weights: equal for equal models, also in another process."""

    @abstractmethod
    def kernels(self, model: M, hardware: Hardware) -> Mapping[str, OpKernels]:
        """For every op of the graph its kernels, or why there is none, asked of the runtime.

        Args:
            model: the model.
            hardware: the machine that is converted for.
        """

    @abstractmethod
    def observe_tensors(
        self, model: M, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, BatchStats]]:
        """Run batches, and say what every part of a batch held in the tensors that are named.

        Args:
            model: the model.
            batches: inputs, as `predict` takes them.
            tensors: names of ops and graph inputs; what they hold is reduced at once, so that
                memory does not grow with the data.
        """

    @abstractmethod
    def convert_graph(self, model: M, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> M:
        """A new model in the precisions of a plan that lowers something.

        Args:
            model: the model, its layers repaired already; it stays untouched.
            plan: the plan, and the flow of INT8 and 16 bits that follows from it.
            ranges: quantized tensor (`plan.flow.root`) → the range that its scale has to hold.

        Raises:
            ConversionError: the framework refuses.
        """

    @abstractmethod
    def save(self, model: M, folder: Path) -> None:
        """Write the model into a folder that exists and is empty."""

    @abstractmethod
    def restore(self, folder: Path) -> M:
        """Read back what `save` wrote; never runs code from a file.

        Raises:
            ModelLoadError: the files are missing, truncated or tampered with.
        """

    # What has a default

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` (object or path) looks like a model of this framework.

        Asked of adaptors that come from elsewhere; must answer without importing the framework.
        """
        return False

    def copied(self, model: M) -> M | None:
        """A model that can be sent to another process as it is; None where it is loaded anew there.

        For frameworks that do not name the ops of a model alike whenever it is loaded.
        """
        return None

    def threads(self, count: int | None) -> AbstractContextManager[None]:
        """For a while, let the framework use `count` threads; None leaves it as it is."""
        return nullcontext()

    def int8_accumulation(self, hardware: Hardware) -> Products:
        """How the integer kernels multiply bytes on the machine that is converted for.

        By the flags of its CPU; a framework whose runtime can be asked is asked.
        """
        return dict.fromkeys(KernelKind, hardware.byte_products)

    def op_types(self) -> Collection[str]:
        """Every op type that the framework has: by default those of its `kinds`."""
        return frozenset(chain.from_iterable(self.op_kinds.values()))

    def amp_lists(self, precision: Precision) -> FourLists:
        """The four lists of a 16-bit precision, by the framework's op types, before any edits."""
        return canonical_lists(precision).translated(self.op_kinds)

    # The roads, the same for all

    def space(
        self,
        model: M,
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
        found = built_capabilities(self.kernels(model, hardware), hardware)
        return TuningSpace(self.graph(model), found, lists)

    def observe(self, model: M, batches: Iterable[Any], space: TuningSpace) -> Observations:
        """One pass over calibration inputs, in memory that does not grow with their number."""
        return conversion.observe(self, model, batches, space)

    def convert(
        self, model: M, plan: ResolvedPlan, observations: Observations, space: TuningSpace
    ) -> M:
        """The model in the precisions of a plan; itself where the plan lowers nothing.

        Raises:
            ConversionError: a quantized tensor was never observed, or the framework refuses.
            PlanError: an op cannot be repaired as the plan says.
        """
        return conversion.convert(self, model, plan, observations, space)
