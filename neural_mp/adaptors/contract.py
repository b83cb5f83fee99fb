"""The contract of an adaptor: all that knows a framework, and nothing that chooses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from neural_mp.adaptors.common import conversion
from neural_mp.adaptors.common.calibration import TensorSummary
from neural_mp.adaptors.common.capabilities import OpKernels, built_capabilities
from neural_mp.adaptors.common.cross_layer_scaling import Layer, LayerChange
from neural_mp.adaptors.common.int8_accumulation import Products
from neural_mp.adaptors.common.op_outputs import OpValue
from neural_mp.amp import FourLists, canonical_lists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.kernel_trace import Executed
from neural_mp.core.observations import Observations, Range
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError
from neural_mp.space import Capability, ResolvedPlan, TuningSpace
from neural_mp.util.validators import non_negative_integer, record

#: A model as its adaptor holds it; opaque to everyone else.
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
    (`neural_mp.adaptors.common.conversion`), and end in these methods.

    An adaptor never chooses a precision and never evaluates accuracy. Conversion is deterministic:
    the same model, plan and observations give the same result.
    """

    framework: ClassVar[str]
    #: Endings of the single files that `save_file` writes.
    file_suffixes: ClassVar[tuple[str, ...]] = ()
    #: The packages whose versions decide what its models run like.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether `inputs` of `load` may be shapes, with None for axes that are to be free.
    frees_axes: ClassVar[bool] = False

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` (object or path) looks like a model of this framework.

        Asked of adaptors that come from elsewhere; must answer without importing the framework.
        """
        return False

    # What a framework gives: its models

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

    def copied(self, model: M) -> M | None:
        """A model that can be sent to another process as it is; None where it is loaded anew there.

        For frameworks that do not name the ops of a model alike whenever it is loaded.
        """
        return None

    def warnings(self, model: M) -> tuple[str, ...]:
        """What the user should know of how the model was taken in; by default its `warnings`."""
        return tuple(getattr(model, "warnings", ()))

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
    def size(self, model: M) -> int:
        """Bytes the weights take."""

    @abstractmethod
    def fingerprint(self, model: M) -> str:
        """A digest of the ops and weights: equal for equal models, also in another process."""

    @abstractmethod
    def conversion_counts(self, model: M) -> ConversionCounts:
        """The casts, quantizations and dequantizations of one run."""

    @abstractmethod
    def first_non_finite(self, model: M, inputs: Any) -> str | None:
        """The first op whose result holds NaN or Inf; None if there is none."""

    @abstractmethod
    def time_ops(self, model: M, inputs: Any, runs: int) -> Mapping[str, Sequence[float]]:
        """Op, or conversion by a name of its own → seconds of each of so many runs, in order.

        What runs along with another op is counted with that op.
        """

    def trace(self, model: M, inputs: Any) -> Mapping[str, Executed]:
        """Op → what ran for it in one run, by the runtime's own account.

        An op of which nothing is found ran along in the kernel of another, or needed none. One
        that the run did not come to has no kernels.

        Raises:
            ConversionError: the framework does not say which kernels ran.
        """
        raise ConversionError(f"{self.framework} does not say which kernels ran")

    def threads(self, count: int | None) -> AbstractContextManager[None]:
        """For a while, let the framework use `count` threads; None leaves it as it is."""
        return nullcontext()

    def results(self, model: M) -> OpGraph:
        """The ops whose results a run of the model has, as the untouched model calls them.

        Of an untouched model those of its graph. Of a converted one, ops that run within the kernel
        of another are left out; edges lead past them.
        """
        return self.graph(model)

    def values(self, model: M, ops: Collection[str]) -> Callable[[Any], Mapping[str, OpValue]]:
        """A function that runs one batch and gives the results of some ops.

        What is stored in integers comes as the real numbers that they stand for; what holds no
        real numbers, or lies in a branch that is not taken, is left out.

        Args:
            model: the model, untouched or converted.
            ops: some of its `results`.

        Raises:
            ConversionError: the framework cannot look into its models.
        """
        raise ConversionError(f"{self.framework} cannot show what the ops of its models compute")

    # What a framework gives: kernels, values, conversion

    @abstractmethod
    def kernels(self, model: M, hardware: Hardware, products: Products) -> Mapping[str, OpKernels]:
        """For every op of the graph its kernels, or why there is none, asked of the runtime.

        Args:
            model: the model.
            hardware: the machine that is converted for.
            products: how the integer kernels multiply bytes there.
        """

    def kernel_products(self, hardware: Hardware) -> Products:
        """How the integer kernels multiply bytes on the machine that is converted for.

        By the flags of its CPU; a framework whose runtime can be asked is asked.
        """
        return dict.fromkeys(KernelKind, hardware.byte_products)

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
    def watch(
        self, model: M, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, TensorSummary]]:
        """Run batches, and say what every part of a batch held in the tensors that are named.

        Args:
            model: the model.
            batches: inputs, as `predict` takes them.
            tensors: names of ops and graph inputs; what they hold is reduced at once, so that
                memory does not grow with the data.
        """

    @abstractmethod
    def write(self, model: M, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> M:
        """A new model in the precisions of a plan that lowers something.

        Args:
            model: the model, its layers repaired already; it stays untouched.
            plan: the plan, and the flow of INT8 and 16 bits that follows from it.
            ranges: quantized tensor (`plan.flow.root`) → the range that its scale has to hold.

        Raises:
            ConversionError: the framework refuses.
        """

    def layers(self, model: M) -> Mapping[str, Layer]:
        """Op → its constants, of layers and normalizations that can be repaired; none by default.

        Layers are those with INT8 kernels and a weight; weights are read only when asked for.
        """
        return {}

    def with_layers(self, model: M, changes: Mapping[str, LayerChange]) -> M:
        """The model with other constants in some of its `layers`; the model given is untouched."""
        raise ConversionError(f"{self.framework} models have no layers that can be repaired")

    def channel_keepers(self, model: M) -> Collection[str]:
        """The ops that only move values, and leave every channel where it is; none by default."""
        return ()

    def hessian_traces(
        self, model: M, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """Op → trace of the Hessian by its weight, of the loss in `adaptors.common.hessian`.

        Raises:
            ConversionError: the framework has no gradients.
        """
        raise ConversionError(
            f"{self.framework} has no gradients, which hawq_v2 needs; choose another strategy"
        )

    def wide_kernels(self, model: M) -> frozenset[KernelKind]:
        """The kinds of a model's integer kernels that are right only where products are exact.

        Those with weights beyond ±63; none by default.
        """
        return frozenset()

    def right_everywhere(self, model: M) -> M:
        """A converted model with weights that are right on every processor.

        Raises:
            ConversionError: that cannot be made of the model.
        """
        raise ConversionError(f"{self.framework} models cannot be written anew for this processor")

    # What a framework gives: files

    @abstractmethod
    def save(self, model: M, path: Path) -> None:
        """Write the model into the (existing, empty) folder `path`."""

    @abstractmethod
    def restore(self, path: Path) -> M:
        """Read back what `save` wrote; never runs code from a file.

        Raises:
            ModelLoadError: the files are missing, truncated or tampered with.
        """

    def save_file(self, model: M, path: Path, metadata: Mapping[str, str]) -> None:
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
    def draw(self, model: M, path: Path) -> tuple[Path, ...]:
        """Write the graph for people to look at: in the framework's binary form, and as text.

        Args:
            model: the model.
            path: the files, without an ending. The text leaves large weights out.

        Returns:
            The files written.
        """

    def compiled(self, model: M) -> Any:
        """The framework's own object, run through its compiler.

        Raises:
            ConversionError: the framework has none.
        """
        raise ConversionError(f"{self.framework} has no compiler that models are run through")

    def export_onnx(self, model: M, path: Path, metadata: Mapping[str, str]) -> None:
        """Write the model as an ONNX file, with `metadata` among its properties.

        Raises:
            ConversionError: the framework or the model has no way to ONNX.
        """
        raise ConversionError(f"{self.framework} models cannot be written as ONNX")

    # The roads, the same for all

    def capabilities(self, model: M, hardware: Hardware) -> Mapping[str, Capability]:
        """What every op of the model can really run in on this hardware, with reasons."""
        found = self.kernels(model, hardware, self.kernel_products(hardware))
        return built_capabilities(found, hardware)

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
        return TuningSpace(self.graph(model), self.capabilities(model, hardware), lists)

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

    def profile(self, model: M, inputs: Any) -> Mapping[str, float]:
        """Op → seconds of one run: the median of a few."""
        return conversion.profile(self, model, inputs)
