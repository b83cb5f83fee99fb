"""Kernel logs, read from a file or recorded from a running program."""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from types import FrameType

from neural_mp.errors import KernelLogError
from neural_mp.io.files import require_regular_file
from neural_mp.io.limits import MAX_DATA_VALUES
from neural_mp.io.readers import JsonError, load_json
from neural_mp.profiling.kernel_records import (
    ENABLE_ONEDNN,
    MARKERS,
    VARIABLES,
    KernelLog,
    OneDnnReader,
    read_profile,
)
from neural_mp.util.system.environment import restore_users_environment
from neural_mp.util.validators import file_path, validate_option

_MARKERS = tuple(marker.encode() for marker in MARKERS)
_MARKER = re.compile(b"|".join(_MARKERS))


class Sieve:
    """Filter that separates log lines, passed to `keep` from their marker on, from bytes."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep, self._rest = keep, b""

    def pass_through(self, part: bytes) -> bytes:
        """Return the part of the stream that certainly does not belong to the log."""
        *lines, rest = (self._rest + part).split(b"\n")
        through = []
        for line in lines:
            match = _MARKER.search(line)
            if match:
                self._keep(line[match.start() :].decode("utf-8", "replace"))
                through.append(line[: match.start()])
            else:
                through.append(line + b"\n")
        match = _MARKER.search(rest)
        cut = match.start() if match else len(rest) - _count_marker_bytes(rest)
        self._rest = rest[cut:]
        return b"".join((*through, rest[:cut]))

    def ended(self) -> bytes:
        """Return the bytes still held back at the end of the stream."""
        rest, self._rest = self._rest, b""
        if _MARKER.match(rest):
            self._keep(rest.decode("utf-8", "replace"))
            return b""
        return rest


def _count_marker_bytes(rest: bytes) -> int:
    """Return the number of final bytes that may begin a marker."""
    longest = max(map(len, _MARKERS)) - 1
    for count in range(min(longest, len(rest)), 0, -1):
        if any(marker.startswith(rest[-count:]) for marker in _MARKERS):
            return count
    return 0


_STANDARD_OUTPUT = 1
#: Maximum delay of a program's output, in seconds.
_DELAY = 0.05
_in_use = threading.Lock()


@contextmanager
def sieve_standard_output(sieve: Sieve) -> Iterator[None]:
    """Filter standard output in this context; other output is printed with little delay.

    A file is used instead of a pipe: a kernel that writes to a full pipe while holding the GIL
    would deadlock with the reader, which needs the GIL. Output that child processes print after the
    context is lost.

    Raises:
        KernelLogError: a filter is active already, standard output is closed, or the system is
            Windows.
    """
    if not hasattr(os, "pread"):
        raise KernelLogError(
            "the kernels of a running process can be logged on Linux and macOS only; set "
            "ONEDNN_VERBOSE=1 before the program starts, and read its output with `neural-mp "
            "kernels FILE`"
        )
    if not _in_use.acquire(blocking=False):
        raise KernelLogError(
            "a kernel log is already being recorded; end the first kernel_log() context before"
        )
    try:
        with _open_real_output() as real, tempfile.TemporaryFile() as file:
            ended = threading.Event()
            arguments = (file.fileno(), real, sieve, ended)
            reading = threading.Thread(target=_follow_file, args=arguments, daemon=True)
            _flush_buffers()
            os.dup2(file.fileno(), _STANDARD_OUTPUT)
            reading.start()
            try:
                yield
            finally:
                _flush_buffers()
                os.dup2(real, _STANDARD_OUTPUT)
                ended.set()
                reading.join()
    finally:
        _in_use.release()


@contextmanager
def _open_real_output() -> Iterator[int]:
    try:
        # If Python found it closed, its descriptor may belong to another file.
        real = os.dup(_STANDARD_OUTPUT if sys.stdout is not None else -1)
    except OSError:
        raise KernelLogError(
            "standard output is closed, but required for the log of oneDNN; redirect standard "
            "output, e.g. with `> /dev/null`"
        ) from None
    try:
        yield real
    finally:
        os.close(real)


def _flush_buffers() -> None:
    sys.stdout.flush()
    ctypes.CDLL(None).fflush(None)


def _follow_file(file: int, real: int, sieve: Sieve, ended: threading.Event) -> None:
    """Read a file while it grows, up to its size when `ended` is set."""
    position, last = 0, False
    while True:
        while part := os.pread(file, 1 << 16, position):
            position += len(part)
            _write_fully(real, sieve.pass_through(part))
        if last:
            break
        last = ended.wait(_DELAY)
    _write_fully(real, sieve.ended())


def _write_fully(target: int, text: bytes) -> None:
    while text:
        text = text[os.write(target, text) :]


_SILENCE = "PyTorch ran no oneDNN kernels in this context, only its own kernels"
#: Header of the log, which oneDNN prints once per process.
_header = {"isa": "", "library": ""}


def read_kernel_log(path_or_lines: str | Path | Iterable[str]) -> KernelLog:
    """Read oneDNN's verbose log, of any version, or an ONNX Runtime profile.

    Other lines are skipped, as is text before a marker.

    Args:
        path_or_lines: a file name, or lines, e.g. an open file.

    Raises:
        KernelLogError: the log cannot be read or contains no kernel; the message has the reason.
    """
    if not isinstance(path_or_lines, str | Path):
        return _parse_log(path_or_lines, "the log")
    path = validate_option("the log", file_path, path_or_lines)
    try:
        require_regular_file(path)
        with path.open(encoding="utf-8", errors="replace") as lines:
            return _parse_log(lines, str(path))
    except OSError as error:
        raise KernelLogError(
            f"{str(path)!r} cannot be read: {error.strerror}; give the output of a program that "
            f"ran with ONEDNN_VERBOSE=1, or a profile of ONNX Runtime"
        ) from error


@contextmanager
def kernel_log() -> Iterator[KernelLog]:
    """Record the oneDNN kernels that PyTorch runs in this process and context.

    Other output is still printed. For TensorFlow, use `neural-mp kernels`, because its log can be
    enabled only by an environment variable.

    Returns:
        A log that is filled when the context ends.

    Raises:
        MissingFrameworkError: PyTorch is not installed.
        KernelLogError: PyTorch lacks oneDNN, a log is being recorded already, or the system is
            Windows.
    """
    from neural_mp.adaptors.detect import FRAMEWORKS
    from neural_mp.adaptors.registry import require_framework

    require_framework("pytorch", "kernel logs of this process")
    adaptor = importlib.import_module(f"{FRAMEWORKS['pytorch'].home}.profiler")
    log, reader = KernelLog(), OneDnnReader(_SILENCE)
    try:
        with sieve_standard_output(Sieve(reader.read_line)), adaptor.verbose_onednn():
            yield log
    finally:
        snapshot = reader.finished_log()
        for name in _header:
            _header[name] = getattr(snapshot, name) or _header[name]
        snapshot = replace(snapshot, isa=_header["isa"], library=_header["library"])
        # The caller holds a reference to the log, so update it in place.
        for field in fields(snapshot):
            object.__setattr__(log, field.name, getattr(snapshot, field.name))


def _parse_log(lines: Iterable[str], name: str) -> KernelLog:
    rest = iter(lines)
    first = next((line for line in rest if line.strip()), "")
    if first.lstrip()[:1] in ("[", "{"):
        content = [first, *rest]
        log = _parse_profile("".join(content), name)
        rest = iter(content[1:])
    else:
        log = None
    if log is None:
        reader = OneDnnReader()
        for line in chain([first], rest):
            reader.read_line(line)
        log = reader.finished_log()
    if not log.calls:
        raise KernelLogError(f"{name} contains no kernel: {log.empty_because}")
    return log


def _parse_profile(text: str, name: str) -> KernelLog | None:
    """Return the log of an ONNX Runtime profile; None if the text is not a profile."""
    try:
        content = load_json(text, MAX_DATA_VALUES)
    except JsonError as error:
        if not name.endswith(".json"):
            return None
        raise KernelLogError(
            f"{name} is not valid JSON ({error}); call end_profiling(), which completes the "
            f"profile of ONNX Runtime"
        ) from error
    if not isinstance(content, list) or not all(isinstance(event, dict) for event in content):
        raise KernelLogError(
            f"{name} must contain a list of events, like a profile of ONNX Runtime, got JSON of "
            f"another structure"
        )
    return read_profile(content)


#: Variable that disables oneDNN in TensorFlow.
_SWITCH = "TF_ENABLE_ONEDNN_OPTS"


def run_with_kernel_log(
    command: Sequence[str], write: Callable[[bytes], None], keep: Callable[[str], None]
) -> tuple[KernelLog, int]:
    """Run a program to its end and read its kernel log.

    Standard output without the log is passed to `write`, each log line to `keep`.

    Returns:
        The log, and the exit code as in a shell: 128 + signal number if a signal ended the program.

    Raises:
        KernelLogError: the program cannot be started.
    """
    environment = restore_users_environment()
    silence = f"the program ran no oneDNN kernels. {ENABLE_ONEDNN}"
    if environment.get(_SWITCH, "1") in ("0", "false"):
        silence = f"oneDNN is disabled by {_SWITCH}={environment[_SWITCH]}; set {_SWITCH}=1"
    reader = OneDnnReader(silence)

    def take_line(line: str) -> None:
        reader.read_line(line)
        keep(line)

    sieve = Sieve(take_line)
    try:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**environment, **dict.fromkeys(VARIABLES, "1")}
        )
    except OSError as error:
        raise KernelLogError(
            f"{command[0]!r} cannot be run: {error.strerror}; give a program and its arguments "
            f"after --, e.g. neural-mp kernels -- python train.py"
        ) from None
    with process, _pass_first_interrupt(process):
        assert process.stdout is not None
        while part := os.read(process.stdout.fileno(), 1 << 16):
            write(sieve.pass_through(part))
        write(sieve.ended())
    code = process.returncode
    return reader.finished_log(), code if code >= 0 else 128 - code


@contextmanager
def _pass_first_interrupt(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Pass the first interrupt to the program alone, and wait for its remaining output.

    Terminals send Ctrl-C to the program themselves; SIGTERM is sent to this process only. A handler
    is used because `KeyboardInterrupt` could be raised at any line and lose output.
    """
    handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        handler = signal.getsignal(number)
        if callable(handler):
            handlers[number] = handler
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore_handlers() -> None:
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def interrupt_once(number: int, frame: FrameType | None) -> None:
        restore_handlers()
        if number == signal.SIGTERM:
            process.terminate()
        with suppress(KeyboardInterrupt):
            handlers[number](number, frame)

    for interrupt in handlers:
        signal.signal(interrupt, interrupt_once)
    try:
        yield
    finally:
        restore_handlers()
