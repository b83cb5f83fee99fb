"""Running graphs: sessions of ONNX Runtime, made so that weights are not copied on the way."""

from __future__ import annotations

import ctypes
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.onnxrt.graph_edit import tensor_bytes, tensors_in
from neural_mp.errors import ConversionError, one_line

#: The version, its first two numbers.
VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
#: Whether a session can be told in which folder the weights of a model given as bytes lie. A
#: session passes over settings that it does not know: there is nothing to ask but the version.
FINDS_WEIGHTS = VERSION >= (1, 21)
#: Whether a convolution whose result is read within a branch is run. Before 1.23, ONNX Runtime's
#: own optimiser ends the process there, with the untouched model as well.
RUNS_LAYERS_BEFORE_BRANCHES = VERSION >= (1, 23)


logger = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
#: How far ONNX Runtime optimises a graph: not at all, as far as it can.
PLAIN, ALL = (
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
)
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
_FORMAT = "session.load_model_format"
_FATAL = 4
#: Types of tensors that do not come as arrays by themselves.
_NON_NUMPY_TYPES = (
    "tensor(bfloat16",
    "tensor(float8",
    "tensor(float4",
    "tensor(int4",
    "tensor(uint4",
)
#: A message of Protocol Buffers cannot be larger than 2 GiB: beyond, weights go to another file.
MESSAGE_LIMIT = 1_900_000_000


class Runner:
    """A session, and what it needs as long as it lives.

    Args:
        program: the graph.
        folder: where its external data lies.
        provider: the execution provider.
        level: how far ONNX Runtime may optimise the graph.
        profiled: whether to take the time of every kernel.
        lean: whether to give memory back after every run rather than to keep it for the next.

    Raises:
        ConversionError: ONNX Runtime refuses the graph.
    """

    def __init__(
        self,
        program: ir.Model,
        folder: Path | None,
        provider: str = CPU,
        *,
        level: ort.GraphOptimizationLevel = ALL,
        profiled: bool = False,
        lean: bool = False,
    ) -> None:
        self._kept = ExitStack()
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL
        options.graph_optimization_level = level
        if lean:
            options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        threads = allowed_threads()
        if threads is not None:
            options.intra_op_num_threads = threads
        if profiled:
            place = self._kept.enter_context(tempfile.TemporaryDirectory())
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(place) / "profile")
        source: str | bytes
        if _inline_bytes(program) > MESSAGE_LIMIT or (folder is not None and not FINDS_WEIGHTS):
            place = self._kept.enter_context(tempfile.TemporaryDirectory())
            source = str(Path(place) / "model.onnx")
            ir.save(program, source, external_data="model.data")
        else:
            if folder is not None:
                options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(folder))
            source = b""
            # A message may begin as the runtime's own format does, which it would be taken for.
            options.add_session_config_entry(_FORMAT, "ONNX")
        try:
            source = source or ir.to_proto(program).SerializeToString()
            self.session = ort.InferenceSession(source, options, providers=[provider])
        except Exception as error:
            # The bindings raise types of their own, and so does the writing of a broken graph.
            logger.debug("no session", exc_info=True)
            raise ConversionError(f"ONNX Runtime refuses the model: {one_line(error)}") from error

        # numpy has no such types as bfloat16, and ONNX Runtime does not know those of ml_dtypes.
        self._plain = {
            output.name
            for output in self.session.get_outputs()
            if not output.type.startswith(_NON_NUMPY_TYPES)
        }
        self._sequences = {
            output.name
            for output in self.session.get_outputs()
            if output.type.startswith("seq(") and output.name in self._plain
        }

    def __call__(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        """The values of some outputs for these inputs, by name.

        Raises:
            ConversionError: a kernel refuses what it is given.
        """
        strange = any(isinstance(v, np.ndarray) and v.dtype.kind == "V" for v in feeds.values())
        try:
            if strange or not self._plain.issuperset(fetches):
                given = {name: _handed_over(value) for name, value in feeds.items()}
                # Of a sequence there is no way from here to its arrays.
                lists = [name for name in fetches if name in self._sequences and not strange]
                others = [name for name in fetches if name not in lists]
                values = map(_taken, self.session.run_with_ort_values(others, given))
                found = dict(zip(others, values, strict=True))
                if lists:
                    found.update(zip(lists, self.session.run(lists, dict(feeds)), strict=True))
                return [found[name] for name in fetches]
            return list(self.session.run(list(fetches), dict(feeds)))
        except Exception as error:
            # The bindings raise types of their own, and RuntimeError, for whatever is wrong.
            logger.debug("a run failed", exc_info=True)
            raise ConversionError(
                f"ONNX Runtime fails to run the model: {one_line(error)}"
            ) from error


def _handed_over(value: Array) -> ort.OrtValue:
    if value.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(value)
    kind = ir.DataType.from_numpy(value.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, int(kind))


def _taken(value: ort.OrtValue) -> Any:
    if not value.is_tensor():
        return value
    kind = ir.DataType(value.element_type())
    if kind in (ir.DataType.STRING, ir.DataType.UNDEFINED) or kind.numpy().kind != "V":
        return value.numpy()
    shape = value.shape()
    count = int(np.prod(shape)) * kind.itemsize
    content = ctypes.string_at(value.data_ptr(), int(count))
    return np.frombuffer(content, kind.numpy()).reshape(shape).copy()


def bytes_of(value: ir.Value | None) -> int:
    """Bytes that a constant takes; those of strings are not counted."""
    return 0 if value is None or value.const_value is None else tensor_bytes(value.const_value)


def _inline_bytes(program: ir.Model) -> int:
    """Bytes of the weights that lie in memory, and so in the message."""
    return sum(
        tensor_bytes(tensor)
        for tensor in tensors_in(program)
        if not isinstance(tensor, ir.ExternalTensor)
    )


class _Limit:
    """The threads that sessions which are made now have; None for no limit of ours."""

    threads: int | None = None


@contextmanager
def limited_threads(count: int | None) -> Iterator[None]:
    """Sessions have the number of threads they were made with; others are made for others."""
    before, _Limit.threads = _Limit.threads, count
    try:
        yield
    finally:
        _Limit.threads = before


def allowed_threads() -> int | None:
    """Threads within an op: what is asked for, else as many as `OMP_NUM_THREADS` says.

    ONNX Runtime leaves that unread by itself. Nor would it help to bind the process to some cores:
    it binds its threads to all of them. None is as ONNX Runtime likes.
    """
    if _Limit.threads is not None:
        return _Limit.threads
    first = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(first) if first.isdecimal() and int(first) else None
