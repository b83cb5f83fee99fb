"""Runs with LiteRT's own profiler, by the C library of its package: Python has no way to it."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array

logger = logging.getLogger(__name__)

#: Beginnings of versions of ai-edge-litert whose C structures are those below.
_VERSIONS = ("2.3.",)
#: Options of an environment: accelerators to register, least severity to log; and their type.
_ACCELERATORS, _SEVERITY, _INTEGER = 24, 25, 2
_CPU, _ERROR = 1, 3
_HOST_MEMORY, _WRITE_LOCK = 1, 1
#: Bytes behind the value of a buffer: kernels read whole vectors.
_PADDING_BYTES = 128
_MAX_RANK = 8
#: Kinds of events: an op that ran in a kernel of LiteRT, and a kernel of a delegate.
_BUILTIN_KERNEL, _DELEGATED_KERNEL = 2, 8
#: Events that the profiler holds; more overwrite the oldest.
_MAX_EVENTS = 2048


class _EnvironmentOption(ctypes.Structure):
    # Tag and kind are numbers of 32 bits, padded to 64.
    _fields_ = (("tag", ctypes.c_int64), ("kind", ctypes.c_int64), ("value", ctypes.c_int64))


class _TensorType(ctypes.Structure):
    _fields_ = (
        ("element", ctypes.c_int),
        ("rank", ctypes.c_uint32, 7),
        ("has_strides", ctypes.c_uint32, 1),
        ("sizes", ctypes.c_int32 * _MAX_RANK),
        ("strides", ctypes.c_uint32 * _MAX_RANK),
    )


class _Event(ctypes.Structure):
    _fields_ = (
        ("tag", ctypes.c_char_p),
        ("kind", ctypes.c_int),
        ("begin", ctypes.c_uint64),
        ("microseconds", ctypes.c_uint64),
        ("memory", ctypes.c_uint64 * 6),
        ("position", ctypes.c_uint64),
        ("subgraph", ctypes.c_uint64),
        ("source", ctypes.c_int),
    )


_P, _I, _N = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
#: Function without the prefix `LiteRt` → types of its arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "CreateEnvironment": (_I, _P, _P),
    "CreateModelFromBuffer": (_P, ctypes.c_char_p, _N, _P),
    "CreateOptions": (_P,),
    "SetOptionsHardwareAccelerators": (_P, _I),
    "CreateOpaqueOptions": (ctypes.c_char_p, _P, _P, _P),
    "AddOpaqueOptions": (_P, _P),
    "CreateCompiledModel": (_P, _P, _P, _P),
    "CompiledModelGetProfiler": (_P, _P),
    "CompiledModelResizeInputTensorNonStrict": (_P, _N, _N, _P, _N),
    "GetNumModelSignatures": (_P, _P),
    "GetModelSignature": (_P, _N, _P),
    "GetModelSubgraph": (_P, _N, _P),
    "GetSignatureSubgraph": (_P, _P),
    "GetSignatureInputTensorByIndex": (_P, _N, _P),
    "GetSignatureOutputTensorByIndex": (_P, _N, _P),
    "GetRankedTensorType": (_P, _P),
    "CreateManagedTensorBuffer": (_P, _I, _P, _N, _P),
    "GetTensorBufferPackedSize": (_P, _P),
    "LockTensorBuffer": (_P, _P, _I),
    "UnlockTensorBuffer": (_P,),
    "RunCompiledModel": (_P, _N, _N, _P, _N, _P),
    "StartProfiler": (_P,),
    "StopProfiler": (_P,),
    "GetNumProfilerEvents": (_P, _P),
    "GetProfilerEvents": (_P, _I, _P),
    "DestroyEnvironment": (_P,),
    "DestroyModel": (_P,),
    "DestroyOptions": (_P,),
    "DestroyCompiledModel": (_P,),
    "DestroyTensorBuffer": (_P,),
}


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _keep_payload(_: int) -> None:
    """Free nothing: Python owns the texts of options."""


@dataclass(frozen=True)
class KernelEvent:
    """One kernel in one run of the main subgraph.

    Attributes:
        name: the kernel's name; for a kernel of LiteRT itself, the type of its op.
        op_type: type of the op that ran in a kernel of LiteRT itself; None for a delegate's.
        seconds: time by the clock in whole microseconds, rounded down: 0 in most runs if a kernel
            takes less.
        is_delegated: whether the kernel is a delegate's.
        position: the op's in the main subgraph; for a delegate's kernel, the kernel's in the part
            of the graph that the delegate runs at once.
    """

    name: str
    op_type: str | None
    seconds: float
    is_delegated: bool
    position: int


@lru_cache(maxsize=1)
def load_library() -> Any:
    """Return the C library of LiteRT with declared functions; None if no library fits.

    The layout of structures in memory is that of single versions.
    """
    spec = util.find_spec("ai_edge_litert")
    if spec is None or spec.origin is None:
        return None
    if not metadata.version("ai-edge-litert").startswith(_VERSIONS):
        return None
    try:
        library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("libLiteRt.*"))))
        for name, arguments in _FUNCTIONS.items():
            function = getattr(library, f"LiteRt{name}")
            function.argtypes = arguments
            function.restype = None if name.startswith("Destroy") else ctypes.c_int
    except (OSError, AttributeError, StopIteration):
        logger.info("no C library of LiteRT with a profiler", exc_info=True)
        return None
    return library


@contextmanager
def open_profiled_run(
    content: bytes, feeds: Sequence[Array], outputs: Sequence[Array], threads: int
) -> Iterator[Callable[[], list[KernelEvent]]]:
    """Load a model, and yield a function that runs the model and returns its kernels in order.

    `feeds` and `outputs` are the inputs and the results of the main subgraph, in order. Sizes may
    differ from those of the file; the library writes results without a look at the sizes.

    Raises:
        ConversionError: no library fits, or LiteRT rejects the model or the inputs.
    """
    library = load_library()
    if library is None:
        versions = " or ".join(f"{version}*" for version in _VERSIONS)
        raise ConversionError(
            f"times of single ops need the profiler of ai-edge-litert {versions}, which is not "
            "there; install this version"
        )
    with ExitStack() as stack:
        session = _Session(library, stack)
        environment = session.create_environment()
        # The library reads the bytes as long as the model lives.
        model = session.create("Model", "CreateModelFromBuffer", environment, content, len(content))
        compiled = session.compile(environment, model, threads)
        number, signature = session.find_main_signature(model)
        for index, feed in enumerate(feeds):
            session.resize_input(compiled, number, index, feed.shape)
        inputs = session.make_buffers(environment, signature, "Input", feeds)
        results = session.make_buffers(environment, signature, "Output", outputs)
        profiler = session.get("CompiledModelGetProfiler", compiled)

        def run() -> list[KernelEvent]:
            session.call("StartProfiler", profiler)
            session.call(
                "RunCompiledModel", compiled, number, len(inputs), inputs, len(results), results
            )
            session.call("StopProfiler", profiler)
            return session.read_events(profiler)

        yield run


@dataclass(frozen=True)
class _Session:
    """Calls of the library, and the objects to destroy afterwards."""

    library: Any
    stack: ExitStack

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            ConversionError: the function reports an error.
        """
        status = getattr(self.library, f"LiteRt{name}")(*arguments)
        if status:
            raise ConversionError(f"the profiler of LiteRT fails: {name} returns status {status}")

    def get(self, name: str, *arguments: Any, kind: Any = _P) -> Any:
        """Return the value that a function writes to its last argument."""
        result = kind()
        self.call(name, *arguments, ctypes.byref(result))
        return result if issubclass(kind, ctypes.Structure) else result.value

    def create(self, kind: str, name: str, *arguments: Any) -> Any:
        """Return the object that a function creates; the object is destroyed at the end."""
        created = self.get(name, *arguments)
        self.stack.callback(getattr(self.library, f"LiteRtDestroy{kind}"), created)
        return created

    def create_environment(self) -> Any:
        """Return an environment with the CPU only, and without messages."""
        options = (_EnvironmentOption * 2)(
            _EnvironmentOption(_ACCELERATORS, _INTEGER, _CPU),
            _EnvironmentOption(_SEVERITY, _INTEGER, _ERROR),
        )
        return self.create("Environment", "CreateEnvironment", len(options), options)

    def compile(self, environment: Any, model: Any, threads: int) -> Any:
        """Return the compiled model, with a profiler."""
        texts = {
            b"runtime_options_string": "enable_profiling = true\n",
            b"xnnpack": f"num_threads = {threads}\n",
        }
        payloads = {key: ctypes.create_string_buffer(text.encode()) for key, text in texts.items()}
        self.stack.callback(payloads.clear)
        options = self.create("Options", "CreateOptions")
        self.call("SetOptionsHardwareAccelerators", options, _CPU)
        for key, payload in payloads.items():
            opaque = self.get("CreateOpaqueOptions", key, payload, _keep_payload)
            self.call("AddOpaqueOptions", options, opaque)
        return self.create("CompiledModel", "CreateCompiledModel", environment, model, options)

    def find_main_signature(self, model: Any) -> tuple[int, Any]:
        """Return the position of the main subgraph's signature, and the signature."""
        main = self.get("GetModelSubgraph", model, 0)
        for number in range(self.get("GetNumModelSignatures", model, kind=_N)):
            signature = self.get("GetModelSignature", model, number)
            if self.get("GetSignatureSubgraph", signature) == main:
                return number, signature
        raise ConversionError("the main subgraph must have a signature, got none")

    def resize_input(self, compiled: Any, number: int, index: int, shape: tuple[int, ...]) -> None:
        """Set the sizes of an input of a signature."""
        sizes = (_I * len(shape))(*shape)
        name = "CompiledModelResizeInputTensorNonStrict"
        self.call(name, compiled, number, index, sizes, len(shape))

    def make_buffers(
        self, environment: Any, signature: Any, side: str, values: Sequence[Array]
    ) -> Any:
        """Return buffers with the inputs or outputs, which a signature has in the same order."""
        buffers = (_P * len(values))()
        for index, value in enumerate(map(np.ascontiguousarray, values)):
            tensor = self.get(f"GetSignature{side}TensorByIndex", signature, index)
            kind = self.get("GetRankedTensorType", tensor, kind=_TensorType)
            kind.rank, kind.has_strides, kind.sizes[: value.ndim] = value.ndim, 0, value.shape
            buffers[index] = buffer = self.create(
                "TensorBuffer",
                "CreateManagedTensorBuffer",
                environment,
                _HOST_MEMORY,
                ctypes.byref(kind),
                value.nbytes + _PADDING_BYTES,
            )
            size = self.get("GetTensorBufferPackedSize", buffer, kind=_N)
            if size != value.nbytes:
                raise ConversionError(f"a tensor must have {size} bytes, got {value.nbytes}")
            address = _P()
            self.call("LockTensorBuffer", buffer, ctypes.byref(address), _WRITE_LOCK)
            ctypes.memmove(address, value.ctypes.data, size)
            self.call("UnlockTensorBuffer", buffer)
        return buffers

    def read_events(self, profiler: Any) -> list[KernelEvent]:
        """Return the kernels of the main subgraph since the start of the profiler."""
        count = self.get("GetNumProfilerEvents", profiler, kind=_I)
        if count >= _MAX_EVENTS:
            raise ConversionError(
                f"LiteRT profiles fewer than {_MAX_EVENTS} kernels a run, got more; models with "
                "loops of many iterations have no times of single ops"
            )
        events = (_Event * count)()
        self.call("GetProfilerEvents", profiler, count, events)
        return [
            _parse_event(event)
            for event in events
            if event.kind in (_BUILTIN_KERNEL, _DELEGATED_KERNEL) and not event.subgraph
        ]


def _parse_event(event: _Event) -> KernelEvent:
    name, is_delegated = event.tag.decode(errors="replace"), event.kind == _DELEGATED_KERNEL
    return KernelEvent(
        name,
        None if is_delegated else name,
        event.microseconds / 1e6,
        is_delegated,
        event.position,
    )
