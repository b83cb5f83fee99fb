"""The contract of an adaptor: everything specific to a framework, and no tuning decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from neural_mp.adaptors.common import conversion, optional
from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.adaptors.common.capabilities import OpKernels, built_capabilities
from neural_mp.adaptors.common.counterparts import OpNames
from neural_mp.adaptors.common.fusion_check import UnoptimizedRun
from neural_mp.adaptors.common.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.output_keeping import OutputKeeping
from neural_mp.adaptors.common.simulation import Simulation
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.amp import FourLists, canonical_lists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.kept_outputs import KeptOutputs
from neural_mp.core.observations import Observations, Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.util.json_fields import Count, JsonFields

#: A model as its adaptor represents it: opaque to others, except for `warnings` and `counts`.
M = TypeVar("M")


@dataclass(frozen=True)
class ConversionCounts(JsonFields):
    """The number of conversions that a model runs per inference."""

    casts: Count = 0
    quantize: Count = 0
    dequantize: Count = 0


class Adaptor(ABC, Generic[M]):
    """A framework, generic in its type of model.

    An adaptor provides only framework-specific parts: loading, running, observing and converting
    models, and the available kernels. The pipelines of conversion, calibration and capabilities are
    shared (`neural_mp.adaptors.common.conversion`) and call these methods. Everything else is
    optional: see `neural_mp.adaptors.common.optional`.

    A model may have `warnings`, notes to the user from loading, and `counts`, a `ConversionCounts`.

    An adaptor never chooses a precision and never evaluates accuracy. Conversion is deterministic:
    equal models, plans and observations yield equal results.
    """

    framework: ClassVar[str]
    #: Packages whose versions affect how models run.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether `inputs` of `load` may be shapes, with None for dynamic axes.
    frees_axes: ClassVar[bool] = False
    #: Names of files beside a saved model that it does not read, and that users may replace.
    replaceable_files: ClassVar[Collection[str]] = ()
    #: Kind of op (see `neural_mp.amp.KINDS`) → op types of the framework.
    op_kinds: ClassVar[Mapping[str, Collection[str]]] = {}

    # Optional parts; None if not offered
    op_timing: optional.OpTiming[M] | None = None
    kernel_trace: optional.KernelTrace[M] | None = None
    op_outputs: optional.OpOutputs[M] | None = None
    unoptimized_run: UnoptimizedRun[M] | None = None
    corrections: optional.Corrections[M] | None = None
    hessian: optional.Hessian[M] | None = None
    gradients: optional.Gradients[M] | None = None
    grouped_weights: optional.GroupedWeights[M] | None = None
    layer_inputs: optional.LayerInputs[M] | None = None
    layer_timing: optional.LayerTiming[M] | None = None
    portability: optional.Portability[M] | None = None
    single_file: optional.SingleFile[M] | None = None
    onnx_export: optional.OnnxExport[M] | None = None
    checkpoints: optional.Checkpoints[M] | None = None
    call_recording: optional.CallRecording | None = None
    transfer: optional.Transfer[M] | None = None
    op_names: OpNames[M] | None = None
    compiler: optional.Compiler[M] | None = None
    streams: optional.Streams[M] | None = None
    float_kernels: optional.FloatKernels[M] | None = None
    graph_dump: optional.GraphDump[M] | None = None
    output_keeping: OutputKeeping[M] | None = None

    @property
    def training(self) -> optional.Training | None:
        """Training, if offered: a property, so that adaptors can import its code on first use."""
        return None

    @property
    def simulation(self) -> Simulation[M] | None:
        """Training with the rounding of a plan, if offered: a property like `training`."""
        return None

    # Required methods

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
        """Load a model from a path or from an object of the framework, which stays unchanged.

        Args:
            source: the path or object from the user.
            inputs: names of the inputs, or example inputs, from the user.
            outputs: names of the outputs to keep.
            example: the inputs of one batch, if data is available.
            capture: with `modules`, a model that has no single graph is split into modules that
                have a graph; for frameworks whose models are code.

        Raises:
            ModelLoadError: the model cannot be read, or only by running code from a file.
            CaptureError: the graph of the model cannot be captured.
        """

    @abstractmethod
    def graph(self, model: M) -> OpGraph:
        """Return all ops with their types, data edges and fusion groups."""

    @abstractmethod
    def predict(self, model: M, inputs: Any) -> Any:
        """Run one batch; outputs are numpy arrays if the inputs are numpy arrays."""

    @abstractmethod
    def example_inputs(self, model: M, batch_size: int | None = None) -> Any:
        """Return the inputs that the model was captured with, in the form that `predict` accepts.

        With `batch_size`, the first axis is repeated or cut to this length.
        """

    @abstractmethod
    def native(self, model: M) -> Any:
        """Return the framework's own object; for an unconverted model, the user's object."""

    @abstractmethod
    def weight_bytes(self, model: M) -> int:
        """Return the size of the weights in bytes."""

    @abstractmethod
    def fingerprint(self, model: M) -> str:
        """Return a digest of ops and weights, equal for equal models, also across processes."""

    @abstractmethod
    def kernels(self, model: M, hardware: Hardware) -> Mapping[str, OpKernels]:
        """Return the kernels of every op, or the reason for a missing kernel, from the runtime."""

    @abstractmethod
    def observe_tensors(
        self, model: M, batches: Iterable[Any], tensors: Collection[str]
    ) -> Iterator[tuple[str, BatchStats]]:
        """Run batches and yield the statistics of the named tensors for every part of a batch.

        Tensors are named like ops and graph inputs. Values are reduced immediately, so memory does
        not grow with the data.
        """

    @abstractmethod
    def convert_graph(self, model: M, plan: ResolvedPlan, ranges: Mapping[str, Range]) -> M:
        """Return a new model in the precisions of a plan with at least one lower precision.

        Args:
            model: the model with corrections applied; stays unchanged.
            plan: the plan and its propagation of INT8 and 16 bits.
            ranges: scale owner (`plan.flow.scale_owner`) → the range that its scale must cover.

        Raises:
            ConversionError: the framework rejects the conversion.
        """

    @abstractmethod
    def save(self, model: M, folder: Path) -> None:
        """Write the model into an existing empty folder."""

    @abstractmethod
    def restore(self, folder: Path) -> M:
        """Read back the files of `save`, without running code from them.

        Raises:
            ModelLoadError: the files are missing, truncated or tampered with.
        """

    # Methods with a default

    @classmethod
    def accepts(cls, source: Any) -> bool:
        """Whether `source` (object or path) looks like a model of this framework.

        Called on third-party adaptors only; must not import the framework.
        """
        return False

    def to_picklable(self, model: M) -> M | None:
        """Return a picklable copy for another process; None if the model is reloaded there.

        For frameworks that do not name ops identically on every load.
        """
        return None

    def element_counts(self, model: M, inputs: Any, tensors: Collection[str]) -> dict[str, float]:
        """Return tensor → its number of elements in a run of one batch, over all iterations.

        Tensors that are not floating-point, or empty, are omitted. By default from
        `observe_tensors`; overridden by frameworks that know sizes without computing statistics.
        """
        counts: dict[str, float] = {}
        for name, stats in self.observe_tensors(model, [inputs], tensors):
            counts[name] = counts.get(name, 0.0) + stats.count * len(stats.power)
        return counts

    def prepare(self, model: M) -> None:
        """Make what the first run would make, e.g. a session, so that its time is that of a run.

        By default, nothing.
        """
        return

    def threads(self, count: int | None) -> AbstractContextManager[None]:
        """Let the framework use `count` threads within this context; None changes nothing."""
        return nullcontext()

    def int8_accumulation(self, hardware: Hardware) -> KernelAccumulation:
        """Return the INT8 accumulation of each kind of integer kernel on the target machine.

        By default from the CPU flags; overridden by frameworks whose runtime can be probed.
        """
        return dict.fromkeys(KernelKind, hardware.int8_accumulation)

    def op_types(self) -> Collection[str]:
        """Return the op types of the framework: by default those in `op_kinds`."""
        return frozenset(chain.from_iterable(self.op_kinds.values()))

    def amp_lists(self, precision: Precision) -> FourLists:
        """Return the unedited four lists of a 16-bit precision, by op types of the framework."""
        return canonical_lists(precision).translated(self.op_kinds)

    # Pipelines shared by all frameworks

    def space(
        self,
        model: M,
        hardware: Hardware,
        lists: Mapping[Precision, FourLists] | None = None,
    ) -> TuningSpace:
        """Return the graph with the capabilities of every op.

        `lists` are the four lists of the 16-bit precisions, by default the framework's own.
        """
        if lists is None:
            lists = {p: self.amp_lists(p) for p in Precision if p.is_16_bit}
        capabilities = built_capabilities(self.kernels(model, hardware), hardware)
        return TuningSpace(self.graph(model), capabilities, lists)

    def observe(
        self,
        model: M,
        batches: Iterable[Any],
        space: TuningSpace,
        collected: KeptOutputs | None = None,
    ) -> Observations:
        """Calibrate in one pass over the inputs, in memory that does not grow with their number.

        The outputs are `collected` if the adaptor offers it.
        """
        return conversion.observe(self, model, batches, space, collected)

    def convert(
        self,
        model: M,
        plan: ResolvedPlan,
        observations: Observations,
        space: TuningSpace,
        corrected: CorrectedWeights[M] | None = None,
    ) -> M:
        """Return the model in the precisions of a plan; `model` itself for an all-FP32 plan.

        `corrected` are the corrected weights of the model, by default made without data.

        Raises:
            ConversionError: a quantized tensor was not observed, or the framework rejects the plan.
            PlanError: a correction in the plan cannot be applied.
        """
        return conversion.convert(self, model, plan, observations, space, corrected)
