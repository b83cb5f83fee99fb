"""The members of an adaptor: everything specific to a framework, and no tuning decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from neural_mp.adaptors.common import optional
from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.adaptors.common.capabilities import OpKernels
from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.adaptors.common.simulation import Simulation
from neural_mp.amp import FourLists, build_canonical_lists
from neural_mp.core.enums import Capture
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.observations import KeptOutputs, Observations, Range, WidthFigures
from neural_mp.core.op_timings import OpTrace
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, ConversionError
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array

M = TypeVar("M")
F = TypeVar("F", bound="Framework[Any]")


class Framework(ABC, Generic[M]):
    """A framework, generic in its type of model; `neural_mp.adaptors.contract` adds pipelines.

    Optional members are parts (`neural_mp.adaptors.common.optional`) or methods with a default.
    """

    framework: ClassVar[str]
    #: Packages whose versions affect how models run.
    packages: ClassVar[tuple[str, ...]] = ()
    #: Whether `inputs` of `load` may be shapes, with None for dynamic axes.
    frees_axes: ClassVar[bool] = False
    #: 16-bit precisions of weights that are restored to floats, which no CPU must support.
    stored_precisions: ClassVar[frozenset[Precision]] = frozenset()
    #: Names of files beside a saved model that it does not read, and that users may replace.
    replaceable_files: ClassVar[Collection[str]] = ()
    #: Execution provider of the runtime; empty for its default.
    provider: str = ""
    #: Kind of op (see `neural_mp.amp.KINDS`) → op types of the framework.
    op_kinds: ClassVar[Mapping[str, Collection[str]]] = {}
    #: Types of ops whose dynamic INT8 has a scale for each row of the inputs.
    row_scaled_types: ClassVar[frozenset[str]] = frozenset()

    # Optional parts; None if not offered
    op_outputs: optional.OpOutputs[M] | None = None
    unoptimized_run: optional.UnoptimizedRun[M] | None = None
    corrections: optional.Corrections[M] | None = None
    gradients: optional.Gradients[M] | None = None
    grouped_weights: optional.GroupedWeights[M] | None = None
    layer_inputs: optional.LayerInputs[M] | None = None
    layer_timing: optional.LayerTiming[M] | None = None
    portability: optional.Portability[M] | None = None
    single_file: optional.SingleFile[M] | None = None
    checkpoints: optional.Checkpoints[M] | None = None
    transfer: optional.Transfer[M] | None = None
    compiler: optional.Compiler[M] | None = None

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
        source: object,
        *,
        inputs: object = None,
        outputs: object = None,
        example: object = None,
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
    def accepts(cls, source: object) -> bool:
        """Whether `source` (object or path) looks like a model of this framework.

        Called on third-party adaptors only; must not import the framework.
        """
        return False

    def to_picklable(self, model: M) -> M | None:
        """Return a picklable copy for another process; None if the model is reloaded there.

        For frameworks that do not name ops identically on every load.
        """
        return None

    def element_counts(
        self, model: M, inputs: object, tensors: Collection[str]
    ) -> dict[str, float]:
        """Return tensor → its number of elements in a run of one batch, over all iterations.

        Tensors that are not floating-point, or empty, are omitted. By default from
        `observe_tensors`; overridden by frameworks that know sizes without computing statistics.
        """
        counts: dict[str, float] = {}
        for name, stats in self.observe_tensors(model, [inputs], tensors):
            counts[name] = counts.get(name, 0.0) + stats.count * len(stats.power)
        return counts

    def with_provider(self: F, provider: str) -> F:
        """Return the adaptor whose runtime runs models on an execution provider.

        Raises:
            ConfigurationError: the runtime has no such provider.
        """
        raise ConfigurationError(
            f"provider must be unset for models of {self.framework}, which has no execution "
            f"providers, got {provider!r}; remove the provider"
        )

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
        return build_canonical_lists(precision).translated(self.op_kinds)

    # Optional methods, which raise `ConversionError` by default unless stated

    def offers(self, method: str) -> bool:
        """Whether the adaptor overrides an optional method, such as `export_onnx`."""
        return getattr(type(self), method) is not getattr(Framework, method)

    def time_ops(self, model: M, inputs: object, runs: int) -> Mapping[str, Sequence[float]]:
        """Return op, or conversion under its own name → seconds of each run, in order.

        Fused ops count towards the op that they are fused into.
        """
        raise optional.missing_part_error(self.framework, "times of single ops")

    def op_work(self, model: M, inputs: object) -> tuple[Mapping[str, float], Mapping[str, float]]:
        """Return op → multiplications, and op → elements that it writes, per sample of a batch.

        For accelerators, whose cost is estimated.
        """
        raise optional.missing_part_error(self.framework, "work of single ops")

    def width_figures(self, model: M, inputs: object, observations: Observations) -> WidthFigures:
        """Return the noise of every tensor and weight by width, on one batch.

        For accelerators, whose widths are planned.
        """
        raise optional.missing_part_error(self.framework, "widths of single tensors")

    def trace_kernels(self, model: M, inputs: object) -> Mapping[str, OpTrace]:
        """Return op → its kernels in one run, from the runtime's own trace.

        An op without an entry is fused into another or needs no kernel; an op that was not reached
        has no kernels.
        """
        raise optional.missing_part_error(self.framework, "trace of executed kernels")

    def hessian_traces(
        self, model: M, batches: Iterable[Any], ops: Collection[str]
    ) -> Mapping[str, float]:
        """Return op → trace of the Hessian by its weight, of the loss in `sensitivity.hessian`."""
        without = "gradients, which hawq_v2 needs; choose another strategy"
        raise optional.missing_part_error(self.framework, without)

    def export_onnx(self, model: M, path: Path, metadata: Mapping[str, str]) -> None:
        """Write an ONNX file with metadata as properties.

        Raises:
            ConversionError: the model has ops that ONNX lacks.
        """
        raise optional.missing_part_error(self.framework, "way to ONNX")

    def dump_graph(self, model: M, path: Path) -> tuple[Path, ...]:
        """Write the graph for inspection to a path without suffix; return the files.

        They are in the framework's binary format, and text without large weights.
        """
        raise optional.missing_part_error(self.framework, "dump of a graph")

    def record_calls(
        self, model: object, record: Callable[[Any], None]
    ) -> AbstractContextManager[None]:
        """Pass the inputs of the calls that the user's code makes in this context to `record`.

        `model` is the object that the user's code calls, and runs as before. The inputs are copies
        in a form that `predict` accepts.
        """
        raise optional.missing_part_error(self.framework, "recording of calls")

    def observe_and_keep(
        self, model: M, batches: Iterable[Any], tensors: Collection[str], collected: KeptOutputs
    ) -> Iterator[tuple[str, BatchStats]]:
        """Observe as in `observe_tensors`, and collect the outputs of every batch.

        The outputs equal those of any run up to rounding. By default, none are collected.
        """
        return self.observe_tensors(model, batches, tensors)

    def with_integer_io(self, model: M, batches: Iterable[Any]) -> M:
        """Return a model that takes and returns INT8 in its own runtime, and here floats.

        Inputs and outputs keep their names. Values that the model has in float only get their
        ranges from the batches.
        """
        raise optional.missing_part_error(self.framework, "integer inputs and outputs")

    def with_int8_cache(self, model: M) -> M:
        """Return a decoder whose conversions keep keys and values of earlier tokens in INT8.

        Raises:
            ConversionError: the model is no decoder that is captured layer by layer.
        """
        raise ConversionError(
            f"kv_cache='int8' requires a decoder in PyTorch, got a model in {self.framework}; "
            f"remove kv_cache"
        )

    def with_weight_scales(self, model: M, scales: Mapping[str, Array]) -> M:
        """Return the model whose next conversion stores some INT8 weights with these scales.

        `scales` are op → the scale of each output channel, float32.
        """
        raise optional.missing_part_error(self.framework, "weights with given scales")

    def with_op_names(self, model: M, names: Mapping[str, str]) -> M:
        """Return the model with new names of ops, if the runtime does not keep those of a file.

        By default the model itself.
        """
        return model

    def with_streams(self, model: M, count: int) -> M:
        """Return the model compiled for concurrent calls that share its threads.

        By default the model itself.
        """
        return model

    def faster_kernels(
        self, model: M, inputs: object, op_names: Collection[str]
    ) -> Mapping[str, str]:
        """Return op → an FP32 kernel (`OpConfig.kernel`) faster than the framework's own.

        Times are those on the inputs, in interleaved runs with the current number of threads. Empty
        by default, and if all these ops together take too little time to matter.
        """
        return {}
