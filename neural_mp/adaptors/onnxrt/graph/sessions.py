"""Sessions of ONNX Runtime that do not copy weights."""

from __future__ import annotations

import ctypes
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.common.threads import get_allowed_threads
from neural_mp.adaptors.onnxrt.graph.edit import count_tensor_bytes, iterate_all_constants
from neural_mp.adaptors.onnxrt.graph.protos import save_program, serialize_to_message
from neural_mp.errors import ConfigurationError, ConversionError, did_you_mean, one_line
from neural_mp.io.files import is_utf8
from neural_mp.util.system.processes import keep_in_forks
from neural_mp.util.system.watched_thread import watch_calls

#: Major and minor version.
VERSION = tuple(map(int, ort.__version__.split(".")[:2]))
#: Whether sessions accept the weight folder of a serialized model. Decided by version, as sessions
#: ignore unknown settings.
FINDS_WEIGHTS = VERSION >= (1, 21)
#: Whether convolutions whose result is read within a branch can run. Before 1.23, ONNX Runtime's
#: optimizer crashes the process on them, even in the unconverted model.
RUNS_LAYERS_BEFORE_BRANCHES = VERSION >= (1, 23)


logger = logging.getLogger(__name__)

CPU = "CPUExecutionProvider"
#: Optimization levels of ONNX Runtime: none, all.
PLAIN = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
ALL = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
_FOLDER_OF_WEIGHTS = "session.model_external_initializers_file_folder_path"
_OPTIMIZED_WEIGHTS = "session.optimized_model_external_initializers_file_name"
_OPTIMIZED_WEIGHTS_LEAST = "session.optimized_model_external_initializers_min_size_in_bytes"
_FORMAT = "session.load_model_format"
_FATAL = 4
#: Tensor types that are not returned as arrays automatically.
_NON_NUMPY_TYPES = tuple(
    f"tensor({kind}" for kind in ("bfloat16", "float8", "float4", "int4", "uint4")
)
#: Protocol Buffers messages are limited to 2 GiB: larger weights go to another file.
MESSAGE_LIMIT = 1_900_000_000


def check_provider(provider: str) -> str:
    """Return the name of an execution provider; sessions replace a missing one by the CPU.

    Raises:
        ConfigurationError: the installed ONNX Runtime does not have the provider.
    """
    available = ort.get_available_providers()
    if provider not in available:
        raise ConfigurationError(
            f"provider must be one of those of the installed ONNX Runtime "
            f"({', '.join(available)}), got {provider!r}{did_you_mean(provider, available)}; "
            f"install a build of ONNX Runtime with this provider, or choose another"
        )
    return provider


class _RunEnding:
    """Means to end the runs of a session from another thread.

    Attributes:
        options: the options of the next run.
    """

    def __init__(self) -> None:
        self.options = ort.RunOptions()

    def end_runs(self) -> None:
        """End the present runs, also loops without end; later ones are not affected."""
        ended, self.options = self.options, ort.RunOptions()
        ended.terminate = True


#: All sessions of the process.
_SESSIONS: WeakSet[ort.InferenceSession] = WeakSet()
keep_in_forks(_SESSIONS)


class Runner:
    """A session with its resources.

    Args:
        program: the graph.
        folder: the folder of its external data.
        provider: the execution provider.
        level: the optimization level.
        profiled: whether to time every kernel.
        lean: whether to release memory after every run instead of keeping it.
        optimized: file to write the optimized graph to; its weights go next to the file.
        entries: further settings of the session.

    Raises:
        ConversionError: ONNX Runtime rejects the graph.
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
        optimized: Path | None = None,
        entries: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._kept = ExitStack()
        options = ort.SessionOptions()
        options.log_severity_level = _FATAL
        options.graph_optimization_level = level
        if lean:
            options.enable_cpu_mem_arena = options.enable_mem_pattern = False
        threads = get_allowed_threads()
        if threads is not None:
            options.intra_op_num_threads = threads
        if profiled:
            directory = self._kept.enter_context(tempfile.TemporaryDirectory())
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(directory) / "profile")
        for name, value in entries.items():
            options.add_session_config_entry(name, value)
        if optimized is not None:
            options.optimized_model_filepath = str(optimized)
            options.add_session_config_entry(_OPTIMIZED_WEIGHTS, f"{optimized.name}.data")
            options.add_session_config_entry(_OPTIMIZED_WEIGHTS_LEAST, "1024")
        source = ""
        inline = (t for t in iterate_all_constants(program) if not isinstance(t, ir.ExternalTensor))
        too_large = sum(map(count_tensor_bytes, inline)) > MESSAGE_LIMIT
        if too_large or (folder is not None and not (FINDS_WEIGHTS and is_utf8(folder))):
            directory = self._kept.enter_context(tempfile.TemporaryDirectory())
            source = str(Path(directory) / "model.onnx")
            save_program(program, Path(source), "model.data")
        else:
            if folder is not None:
                options.add_session_config_entry(_FOLDER_OF_WEIGHTS, str(folder))
            # Otherwise a message may be mistaken for the runtime's own format.
            options.add_session_config_entry(_FORMAT, "ONNX")
        try:
            content = source or serialize_to_message(program).SerializeToString()
            self.session = ort.InferenceSession(content, options, providers=[provider])
            _SESSIONS.add(self.session)
        except Exception as error:
            # The bindings, and the serialization of a broken graph, raise their own types.
            logger.debug("session creation failed", exc_info=True)
            raise ConversionError(f"ONNX Runtime rejects the model: {one_line(error)}") from error

        # numpy lacks e.g. bfloat16, and ONNX Runtime does not support ml_dtypes.
        types = {output.name: output.type for output in self.session.get_outputs()}
        self._plain = {name for name in types if not types[name].startswith(_NON_NUMPY_TYPES)}
        self._sequences = {name for name in self._plain if types[name].startswith("seq(")}
        ports = self.session.get_inputs()
        self._takes_plain = not any(port.type.startswith(_NON_NUMPY_TYPES) for port in ports)
        self._ending = _RunEnding()

    def make_fetcher(self, fetches: Sequence[str]) -> Callable[[Mapping[str, Any]], list[Any]]:
        """Return a function from inputs to the named outputs; see `__call__`."""
        names, run, ending = list(fetches), self.session.run, self._ending
        if not (self._takes_plain and self._plain.issuperset(names)):
            return lambda feeds: self(feeds, names)

        @watch_calls("the model", lambda local: local["ending"].end_runs())
        def fetch_outputs(feeds: Mapping[str, Any]) -> list[Any]:
            try:
                return run(names, feeds, ending.options)
            except Exception as error:
                raise _run_failure(error) from error

        return fetch_outputs

    @watch_calls("the model", lambda local: local["self"]._ending.end_runs())
    def __call__(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        """Return the named outputs for these inputs; raise `ConversionError` if a kernel fails."""
        options = self._ending.options
        extended = any(isinstance(v, np.ndarray) and v.dtype.kind == "V" for v in feeds.values())
        try:
            if extended or not self._plain.issuperset(fetches):
                inputs = {name: _to_ort_value(value) for name, value in feeds.items()}
                # The arrays of a sequence are not accessible through an OrtValue.
                lists = [name for name in fetches if name in self._sequences and not extended]
                tensors = [name for name in fetches if name not in lists]
                results = self.session.run_with_ort_values(tensors, inputs, options)
                outputs = dict(zip(tensors, map(_from_ort_value, results), strict=True))
                if lists:
                    arrays = self.session.run(lists, dict(feeds), options)
                    outputs.update(zip(lists, arrays, strict=True))
                return [outputs[name] for name in fetches]
            return list(self.session.run(list(fetches), dict(feeds), options))
        except Exception as error:
            raise _run_failure(error) from error


def _run_failure(error: Exception) -> ConversionError:
    """Return the error of a run: the bindings raise their own types and RuntimeError for any."""
    logger.debug("a run failed", exc_info=True)
    return ConversionError(f"ONNX Runtime fails to run the model: {one_line(error)}")


def _to_ort_value(value: Array) -> ort.OrtValue:
    if value.dtype.kind != "V":
        return ort.OrtValue.ortvalue_from_numpy(value)
    kind = ir.DataType.from_numpy(value.dtype)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(value, int(kind))


def _from_ort_value(value: ort.OrtValue) -> Any:
    if not value.is_tensor():
        return value
    kind = ir.DataType(value.element_type())
    if kind in (ir.DataType.STRING, ir.DataType.UNDEFINED) or kind.numpy().kind != "V":
        return value.numpy()
    size = int(int(np.prod(value.shape())) * kind.itemsize)
    content = ctypes.string_at(value.data_ptr(), size)
    return np.frombuffer(content, kind.numpy()).reshape(value.shape()).copy()


def count_constant_bytes(value: ir.Value | None) -> int:
    """Return the size of a constant in bytes; 0 for strings."""
    return (
        0 if value is None or value.const_value is None else count_tensor_bytes(value.const_value)
    )
