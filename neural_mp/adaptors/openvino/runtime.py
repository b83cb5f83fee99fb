"""OpenVINO's CPU plugin: import without telemetry, compiled models and their kernels."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import ml_dtypes
import numpy as np

from neural_mp.adaptors.common.threads import get_allowed_threads
from neural_mp.adaptors.openvino.ops import (
    INTEGER_KERNELS,
    MOVING_KERNELS,
    Role,
    get_op_row,
    has_role,
)
from neural_mp.errors import ConversionError, one_line
from neural_mp.util.pytree import Array
from neural_mp.util.system.processes import check_process, keep_in_forks
from neural_mp.util.system.watched_thread import watch_calls

logger = logging.getLogger(__name__)

_TELEMETRY = "openvino_telemetry"


def _import_without_telemetry() -> ModuleType:
    """Return the package `openvino`, imported so that its converters find no telemetry client.

    The client of `openvino-telemetry` writes an id into the home directory and sends events. An
    empty module in its place makes OpenVINO fall back to a stub of its own.
    """
    if _TELEMETRY not in sys.modules:
        sys.modules[_TELEMETRY] = ModuleType(_TELEMETRY)
    import openvino

    return openvino


if TYPE_CHECKING:
    import openvino as ov
else:
    ov = _import_without_telemetry()
    # Two threads deadlock in their first conversion of a type (OpenVINO 2026.4): convert one here.
    ov.Type.f32.to_dtype()
#: Constructors of nodes.
ops = ov.opset13

CPU = "CPU"
#: Shape of each input, in the order of the model.
Shapes = tuple[tuple[int, ...], ...]
#: Settings of every compiled model.
_SETTINGS: Mapping[str, object] = {"PERFORMANCE_HINT": "LATENCY"}
#: Place of the precision hint in the runtime information of a model.
PRECISION_HINT = ["neural_mp", "inference_precision"]
#: No kernels that the plugin generates for several ops; see `Runner._merges_int8_products`.
_SEPARATE_KERNELS: Mapping[str, object] = {"SNIPPETS_MODE": "DISABLE"}
#: No transformations into integer kernels.
_FLOAT_KERNELS: Mapping[str, object] = {"LP_TRANSFORMS_MODE": "NO"}
_NOT_EXECUTED = "not_executed"
#: Maximum number of remembered shapes of the inputs of a compiled model.
_MAX_SHAPES = 4096


@lru_cache(maxsize=1)
def get_core() -> ov.Core:
    """Return the process-wide `openvino.Core`."""
    return make_core()


def make_core() -> ov.Core:
    """Return an `openvino.Core` that has loaded its plugin for CPUs."""
    core = ov.Core()
    with preserve_signal_stack():
        core.get_property(CPU, "FULL_DEVICE_NAME")
    return core


def to_bytes(model: ov.Model) -> tuple[bytes, bytes]:
    """Return an `openvino.Model` as the contents of its `.xml` and `.bin` file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.xml"
        ov.save_model(model, path, compress_to_fp16=False)
        return path.read_bytes(), path.with_suffix(".bin").read_bytes()


def from_bytes(text: bytes, weights: bytes) -> ov.Model:
    """Return the `openvino.Model` of `to_bytes`."""
    return get_core().read_model(text, weights)


def choose_precision_hint(model: ov.Model) -> str:
    """Return the precision that the float ops of an `openvino.Model` are compiled for.

    The default of a CPU with BF16 is bf16, which would run FP32 ops in 16 bits.
    """
    is_bf16 = (
        model.has_rt_info(PRECISION_HINT)
        and model.get_rt_info(PRECISION_HINT).astype(str) == "bf16"
    )
    return "bf16" if is_bf16 else "f32"


@dataclass(frozen=True)
class Kernel:
    """A kernel of a compiled model.

    Attributes:
        name: its name in the runtime.
        type: its layer type, such as `Convolution` or `Reorder`.
        precision: the element type that it computes in, such as `u8` or `f32`.
        primitive: the implementation, such as `brgconv_avx512_I8`.
        ops: the friendly names of the ops that it runs; empty for inserted conversions.
        constants: the names of the constants that it reads.
        microseconds: average time of all runs so far; None if not executed.
    """

    name: str
    type: str
    precision: str
    primitive: str
    ops: tuple[str, ...]
    constants: tuple[str, ...]
    microseconds: float | None

    @property
    def is_integer(self) -> bool:
        """Whether the kernel computes with 8-bit integers."""
        return self.type in INTEGER_KERNELS and self.primitive.endswith(("_I8", "_i8", "_u8"))

    @property
    def may_be_integer(self) -> bool:
        """Whether kernels of this type compute with integers or only move values."""
        return self.type in INTEGER_KERNELS | MOVING_KERNELS


def get_numpy_dtype(kind: ov.Type) -> np.dtype[Any]:
    """Return the numpy dtype of an element type, object for strings."""
    if kind == ov.Type.bf16:
        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(object if kind == ov.Type.string else kind.to_dtype())


def in_own_type(values: Array, kind: ov.Type) -> Array:
    """Return values with their own dtype: OpenVINO's arrays of bfloat16 claim to be float16."""
    array = np.asarray(values)
    return array.view(ml_dtypes.bfloat16) if kind == ov.Type.bf16 else array


class _Request:
    """An inference request, the lock of its caller, and the inputs that it reads."""

    def __init__(self, infer: ov.InferRequest) -> None:
        self.infer = infer
        self.lock = Lock()
        self.inputs: tuple[Sequence[Array], list[Array | ov.Tensor]] = ((), [])
        self.is_running = False

    def finish_interrupted_run(self) -> None:
        """Wait for a run that was interrupted after its start."""
        if not self.is_running:
            return
        try:
            self.infer.wait()
        except RuntimeError:
            logger.debug("an interrupted run failed", exc_info=True)
        self.is_running = False


class Runner:
    """A compiled model with one inference request per stream; more callers wait for one.

    Args:
        model: the `openvino.Model`.
        profiled: whether to time every kernel.
        streams: concurrent calls, among which the threads are divided; None for one call.
        low_precision: whether quantized tensors are stored in integers, for integer kernels; else
            they are rounded in float.

    Raises:
        ConversionError: OpenVINO rejects the model, or compiles a model of other shapes.
        ForkError: OpenVINO compiled a model in a parent of this process before the fork.
    """

    def __init__(
        self,
        model: ov.Model,
        *,
        profiled: bool = False,
        streams: int | None = None,
        low_precision: bool = True,
    ) -> None:
        check_process("OpenVINO")
        settings = {**_SETTINGS, "INFERENCE_PRECISION_HINT": choose_precision_hint(model)}
        if not low_precision:
            settings |= {**_FLOAT_KERNELS, **_SEPARATE_KERNELS}
        if streams is not None:
            settings |= {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": streams}
        threads = get_allowed_threads()
        if threads is not None:
            settings["INFERENCE_NUM_THREADS"] = threads
        if profiled:
            settings["PERF_COUNT"] = True
        self._has_state = bool(model.get_sinks())
        # Models with a state may end the process if one plugin compiled several (OpenVINO 2026.4).
        plugin = make_core() if self._has_state else get_core()
        try:
            self._compiled = plugin.compile_model(model, CPU, settings)
            if self._merges_int8_products():
                logger.debug("compiled again with %s", _SEPARATE_KERNELS)
                self._compiled = plugin.compile_model(model, CPU, {**settings, **_SEPARATE_KERNELS})
            self._requests = [
                _Request(self._compiled.create_infer_request()) for _ in range(streams or 1)
            ]
            self._running: list[_Request] = []
            self._turns = itertools.count()
            _RUNNERS.add(self)
        except Exception as error:
            # The bindings raise RuntimeError and types of their own.
            logger.debug("no compiled model", exc_info=True)
            raise ConversionError(f"OpenVINO rejects the model: {one_line(error)}") from error
        _check_shapes(model, self._compiled.get_runtime_model())
        self._outputs = [port.get_element_type() for port in self._compiled.outputs]
        # OpenVINO reads plain arrays where they are; it converts strings and bfloat16.
        types = [port.get_element_type() for port in self._compiled.inputs]
        self._shares = not {ov.Type.string, ov.Type.bf16} & {*types}
        self._plain = ov.Type.bf16 not in self._outputs
        self._accepted = set[Shapes]()
        #: False after a failed run: the plugin keeps its shapes, and any inputs may fail.
        self.is_usable = True

    @watch_calls("the model")
    def __call__(self, feeds: Sequence[Array], *, shared: bool = False) -> list[Array]:
        """Return all outputs for inputs in the order of the model, after a reset of its state.

        Args:
            feeds: the inputs.
            shared: whether the outputs may be views, which the next run overwrites.

        Raises:
            ConversionError: a kernel fails.
            ForkError: the parent of this forked process was running the model at the fork.
        """
        if not self._requests:
            check_process("OpenVINO")
        try:
            request = self._select_request()
            # An interrupt may come at any moment; of all ways to lock, only this one then unlocks.
            with request.lock:
                results = self._run_request(request, feeds, shared)
        except Exception as error:
            logger.debug("a run failed", exc_info=True)
            raise ConversionError(f"OpenVINO fails to run the model: {one_line(error)}") from error
        if self._plain:
            return list(results)
        return [in_own_type(results[index], kind) for index, kind in enumerate(self._outputs)]

    def drop_running_requests(self) -> None:
        """Use none of the requests that are running from now on, and keep them as they are."""
        self._running = [request for request in self._requests if request.lock.locked()]
        self._requests = [request for request in self._requests if not request.lock.locked()]

    def _select_request(self) -> _Request:
        """Return a request that is idle, or one to wait for."""
        if len(self._requests) == 1:
            return self._requests[0]
        start = next(self._turns) % len(self._requests)
        requests = self._requests[start:] + self._requests[:start]
        return next((r for r in requests if not r.lock.locked()), requests[0])

    def _run_request(
        self, request: _Request, feeds: Sequence[Array], shared: bool
    ) -> tuple[Array, ...]:
        """Return the outputs of a run, asynchronous unless inputs of these shapes ran before.

        On one thread, a synchronous run ignores errors: outputs are those of the run before, and
        later runs of any model of the process access freed memory (OpenVINO 2026.4). Shapes cause
        the errors, and an asynchronous run takes more time.
        """
        request.finish_interrupted_run()
        shapes = tuple(value.shape for value in feeds)
        tensors = [self._share_array(value) for value in feeds]
        # The request reads plain arrays where they are, so they must live as long.
        request.inputs = feeds, tensors
        fed = tensors[0] if len(tensors) == 1 else dict(enumerate(tensors))
        infer = request.infer
        if self._has_state:
            infer.reset_state()
        if shapes in self._accepted:
            outputs = infer.infer(fed, share_inputs=self._shares, share_outputs=shared)
            return tuple(outputs.to_tuple())
        request.is_running = True
        infer.start_async(fed, share_inputs=self._shares)
        try:
            infer.wait()
        except RuntimeError:
            self.is_usable = request.is_running = False
            raise
        request.is_running = False
        if len(self._accepted) >= _MAX_SHAPES:
            self._accepted.clear()
        self._accepted.add(shapes)
        return tuple(infer.results.to_tuple())

    def _share_array(self, value: Array) -> Array | ov.Tensor:
        """Return a plain array as OpenVINO's tensor, which spares the search for its type."""
        flags = value.flags
        plain = (
            self._shares and flags.c_contiguous and flags.writeable and value.size and value.ndim
        )
        return ov.Tensor(value, shared_memory=True) if plain else value

    def _merges_int8_products(self) -> bool:
        """Whether a generated kernel reads an int8 weight.

        The plugin computes small products of matrices that follow each other in one such kernel if
        they have up to 8 rows, a fixed number. For INT8, its results are wrong (OpenVINO 2026.4).
        """
        nodes = self._compiled.get_runtime_model().get_ordered_ops()
        constants = (node for node in nodes if not node.get_input_size())
        weights = {
            str(node.get_friendly_name())
            for node in constants
            if _info(node, "layerType") == "Const" and _info(node, "runtimePrecision") == "i8"
        }
        generated = (node for node in nodes if weights and _info(node, "layerType") == "Subgraph")
        return any(weights & {*_parse_kernel(node).constants} for node in generated)

    def executed_kernels(self) -> list[Kernel]:
        """Return the kernels of the compiled model, in execution order, with times if profiled."""
        return [
            _parse_kernel(node) for node in self._compiled.get_runtime_model().get_ordered_ops()
        ]

    def microseconds(self) -> list[float]:
        """Return the average time of all runs so far of each of the kernels; 0 if not executed."""
        nodes = self._compiled.get_runtime_model().get_ordered_ops()
        times = (_info(node, _TIME) for node in nodes)
        return [0.0 if time == _NOT_EXECUTED else float(time) for time in times]


#: All runners of the process.
_RUNNERS: WeakSet[Runner | ShapedRunner] = WeakSet()
keep_in_forks(_RUNNERS)


def _leave_running_requests() -> None:
    """Leave the requests and locks that other threads of the parent held at a fork.

    These threads do not exist in the child, so their runs never end there.
    """
    for runner in _RUNNERS:
        if isinstance(runner, ShapedRunner):
            runner.lock = Lock()
        else:
            runner.drop_running_requests()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_running_requests)


def _check_shapes(model: ov.Model, compiled: ov.Model) -> None:
    """Check that a compiled graph has outputs of the shapes of its model.

    Others mean that low-precision transformations added axes, and kernels may then read beyond
    their buffers and end the process (OpenVINO 2026.4).

    Raises:
        ConversionError: the shape of an output differs.
    """
    shapes = {
        str(result.get_friendly_name()): result.get_input_partial_shape(0)
        for result in model.get_results()
    }
    for result in compiled.get_results():
        shape = result.get_input_partial_shape(0)
        expected = shapes.get(str(result.get_friendly_name()), shape)
        if not expected.compatible(shape):
            raise ConversionError(
                f"OpenVINO compiles the model to one with an output of shape {shape} instead of "
                f"{expected}; exclude the ops before that output from conversion"
            )


def _info(node: ov.Node, key: str) -> str:
    return str(node.get_rt_info()[key].astype(str))


def _parse_kernel(node: ov.Node) -> Kernel:
    info = {key: _info(node, key) for key in _FIELDS}
    time = info[_TIME]
    sources = [value.get_node() for value in node.input_values()]
    return Kernel(
        str(node.get_friendly_name()),
        info["layerType"],
        info["runtimePrecision"],
        info["primitiveType"],
        tuple(name for name in info["originalLayersNames"].split(",") if name),
        tuple(str(n.get_friendly_name()) for n in sources if not n.get_input_size()),
        None if time == _NOT_EXECUTED else float(time),
    )


_TIME = "execTimeMcs"
_FIELDS = ("layerType", "runtimePrecision", "primitiveType", "originalLayersNames", _TIME)


#: Ops in a row that share one buffer where shapes are fixed: OpenVINO 2026.4 compiles such a row in
#: time that grows with the cube of its length, 2,000 of them in 20 s instead of 0.6 s.
_MAX_STEPS = 250


class ShapedRunner:
    """Run a model as compiled for the shapes of its example, and as it is for other shapes.

    Kernels of a fixed shape take 1 to 3 % less time: nothing is inferred or looked up in a call.
    They round differently, so the form follows from the shapes of a call alone, never from earlier
    calls. Each form is compiled at its first call.

    Args:
        model: the `openvino.Model`.
        example: the shapes.
        streams: as for `Runner`.
        rounds: whether casts to bfloat16 must round: those of the user, not of a plan.

    Attributes:
        lock: held while a form is compiled or selected.
    """

    def __init__(
        self, model: ov.Model, example: Shapes, *, streams: int | None = None, rounds: bool = True
    ) -> None:
        self._model, self._streams = model, streams
        self._example = example if _may_be_fixed(model, rounds) else None
        self._fixed: Runner | None = None
        self._dynamic: Runner | None = None
        self.lock = Lock()
        _RUNNERS.add(self)

    def __call__(self, feeds: Sequence[Array]) -> list[Array]:
        """Return all outputs for inputs in the order of the model.

        Raises:
            ConversionError: OpenVINO rejects the model, or a kernel fails.
        """
        with self.lock:
            as_example = tuple(value.shape for value in feeds) == self._example
            runner = self._compile_for_example() if as_example else self._compile_for_all()
        return runner(feeds)

    def _compile_for_example(self) -> Runner:
        if self._fixed is None or not self._fixed.is_usable:
            try:
                model = self._model.clone()
                model.reshape(dict(enumerate(self._example or ())))
                self._fixed = Runner(model, streams=self._streams)
            except (ConversionError, RuntimeError):
                # A graph may hold sizes of its own; errors of the user's call come from the
                # dynamic form.
                logger.debug("not compiled for %s", self._example, exc_info=True)
                self._fixed = self._compile_for_all()
        return self._fixed

    def _compile_for_all(self) -> Runner:
        if self._dynamic is None or not self._dynamic.is_usable:
            self._dynamic = Runner(self._model, streams=self._streams)
        return self._dynamic


def _may_be_fixed(model: ov.Model, rounds: bool) -> bool:
    """Whether the model of a fixed shape computes the same up to the order of sums.

    With states, loops and attention with a cache, results differed (OpenVINO 2026.4); between casts
    to bfloat16, the plugin keeps float32 where shapes are fixed.
    """
    nodes = model.get_ordered_ops()
    if not model.is_dynamic() or model.get_sinks():
        return False
    types = {port.get_element_type() for node in nodes for port in node.outputs()}
    has_casts = rounds and any(dtype == ov.Type.bf16 for dtype in types)
    if has_casts or any(get_op_row(node).dynamic_only for node in nodes):
        return False
    return _count_steps_between_layers(nodes) <= _MAX_STEPS


def _count_steps_between_layers(nodes: Iterable[ov.Node]) -> int:
    """Return the most ops in a row without a product or convolution among them."""
    steps: dict[str, int] = {}
    for node in nodes:
        name, is_layer = node.get_name(), has_role(node, Role.LAYER | Role.RECURRENT)
        sources = (steps[value.get_node().get_name()] for value in node.input_values())
        steps[name] = 0 if is_layer else 1 + max(sources, default=0)
    return max(steps.values(), default=0)


class _Stack(ctypes.Structure):
    """`stack_t` of Linux (`sigaltstack(2)`)."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("nbytes", ctypes.c_size_t),
    )


@contextmanager
def preserve_signal_stack() -> Iterator[None]:
    """Restore the alternate signal stack of the calling thread on exit; no effect but on Linux.

    Where a CPU has AMX, OpenVINO (2026.4) sets one for each of its plugins, and frees the memory
    with the plugin. If another thread does that, or the plugins end in another order than that of
    their start, the next signal of this thread ends the process.
    """
    if not sys.platform.startswith("linux"):
        yield
        return
    library, stack = ctypes.CDLL(None), _Stack()
    is_known = library.sigaltstack(None, ctypes.byref(stack)) == 0
    try:
        yield
    finally:
        if is_known:
            library.sigaltstack(ctypes.byref(stack), None)
