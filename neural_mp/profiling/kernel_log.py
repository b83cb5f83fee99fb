"""Which kernels ran, and how long: read from a log, or caught while PyTorch runs."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from types import FrameType

from neural_mp.errors import KernelLogError
from neural_mp.io.files import require_regular_file
from neural_mp.io.limits import MAX_DATA_VALUES
from neural_mp.io.readers import JsonError, load_json
from neural_mp.profiling.kernel_log_parsers import VARIABLES, OneDnnReader, is_profile, read_profile
from neural_mp.profiling.kernel_records import KernelLog
from neural_mp.profiling.stdout_filter import Sieve, sieved_output
from neural_mp.util.environment import users_environment
from neural_mp.util.validators import file_path, validate_option

_SILENCE = "PyTorch ran no kernel of oneDNN in the block: all was computed by kernels of its own"
#: What oneDNN said of itself and of the CPU, which it does once in the life of a process.
_header = {"isa": "", "library": ""}


def read_kernel_log(path_or_lines: str | Path | Iterable[str]) -> KernelLog:
    """Read oneDNN's verbose log, of any version, or the profile of ONNX Runtime.

    Other lines among those of the log are skipped, also what stands before one on its line.

    Args:
        path_or_lines: a file, or its lines; an open file is both.

    Raises:
        KernelLogError: it cannot be read, or no kernel is in it; the message says why.
    """
    if not isinstance(path_or_lines, str | Path):
        return _read(path_or_lines, "the log")
    path = validate_option("the log", file_path, path_or_lines)
    try:
        require_regular_file(path)
        with path.open(encoding="utf-8", errors="replace") as lines:
            return _read(lines, str(path))
    except OSError as error:
        raise KernelLogError(
            f"{str(path)!r} cannot be read: {error.strerror}; give a file that holds the output of "
            f"a program that ran with ONEDNN_VERBOSE=1, or the profile of ONNX Runtime"
        ) from error


@contextmanager
def kernel_log() -> Iterator[KernelLog]:
    """Note which kernels of oneDNN PyTorch runs meanwhile, in this process.

    What the block prints still comes out. Of TensorFlow, run the program by `neural-mp kernels`:
    its log can only be switched on from outside.

    Returns:
        A log which is empty until the block has ended.

    Raises:
        MissingFrameworkError: PyTorch is not installed.
        KernelLogError: PyTorch has no oneDNN, or a log is kept already.
    """
    from neural_mp.adaptors.detect import FRAMEWORKS
    from neural_mp.adaptors.registry import require_framework

    require_framework("pytorch", "kernel logs of this process")
    adaptor = importlib.import_module(f"{FRAMEWORKS['pytorch'].home}.profiler")
    log, reader = KernelLog(), OneDnnReader(_SILENCE)
    try:
        with sieved_output(Sieve(reader.read)), adaptor.verbose():
            yield log
    finally:
        found = reader.log()
        for name in _header:
            _header[name] = getattr(found, name) or _header[name]
        found = replace(found, isa=_header["isa"], library=_header["library"])
        # The block has held the log since before there was anything in it.
        for field in fields(found):
            object.__setattr__(log, field.name, getattr(found, field.name))


def _read(lines: Iterable[str], name: str) -> KernelLog:
    rest = iter(lines)
    first = next((line for line in rest if line.strip()), "")
    if first.lstrip()[:1] in ("[", "{"):
        kept = [first, *rest]
        log = _profile("".join(kept), name)
        rest = iter(kept[1:])
    else:
        log = None
    if log is None:
        reader = OneDnnReader()
        for line in chain([first], rest):
            reader.read(line)
        log = reader.log()
    if not log.calls:
        raise KernelLogError(f"no kernel is in {name}: {log.empty_because}")
    return log


def _profile(text: str, name: str) -> KernelLog | None:
    """The log of a profile; None of text that is none."""
    try:
        content = load_json(text, MAX_DATA_VALUES)
    except JsonError as error:
        if not name.endswith(".json"):
            return None
        raise KernelLogError(
            f"{name} is not whole JSON ({error}); ONNX Runtime writes the profile to its end when "
            f"end_profiling() is called"
        ) from error
    if not is_profile(content):
        raise KernelLogError(
            f"{name} is JSON, and not the list of events that ONNX Runtime writes as a profile"
        )
    return read_profile(content)


#: The variable by which TensorFlow does without oneDNN.
_SWITCH = "TF_ENABLE_ONEDNN_OPTS"


def run_with_kernel_log(
    command: Sequence[str],
    write: Callable[[bytes], None],
    keep: Callable[[str], None] = lambda line: None,
) -> tuple[KernelLog, int]:
    """Run a program to its end and read which kernels ran in it.

    Args:
        command: the program and its arguments.
        write: is given what the program prints on standard output, without the log.
        keep: is given every line of the log.

    Returns:
        The log, and the program's exit code as a shell has it: 128 and the number of the signal
        that ended it.

    Raises:
        KernelLogError: it cannot be started.
    """
    environment = users_environment()
    reader = OneDnnReader(_silence(environment))

    def take(line: str) -> None:
        reader.read(line)
        keep(line)

    sieve = Sieve(take)
    try:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            env={**environment, **dict.fromkeys(VARIABLES, "1")},
        )
    except OSError as error:
        raise KernelLogError(
            f"{command[0]!r} cannot be run: {error.strerror}; give a program and its arguments "
            f"behind --, such as: neural-mp kernels -- python train.py"
        ) from None
    with process, _interrupted_once():
        assert process.stdout is not None
        for part in _parts(process.stdout.fileno()):
            write(sieve.passed(part))
        write(sieve.ended())
    code = process.returncode
    return reader.log(), code if code >= 0 else 128 - code


def _parts(end: int) -> Iterator[bytes]:
    """What comes out of a pipe until it is closed."""
    while part := os.read(end, 1 << 16):
        yield part


@contextmanager
def _interrupted_once() -> Iterator[None]:
    """The first Ctrl-C interrupts the program alone, and what it prints then is waited for.

    It may come at any line here. Caught where it is raised, it would cost a part of the output.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return

    def first(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, before)
        with suppress(KeyboardInterrupt):
            before(number, frame)

    signal.signal(signal.SIGINT, first)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _silence(environment: Mapping[str, str]) -> str:
    if environment.get(_SWITCH, "1") in ("0", "false"):
        return f"oneDNN is off: {_SWITCH}={environment[_SWITCH]} is set; set it to 1"
    return (
        f"the program ran no kernel of oneDNN. In TensorFlow, oneDNN is on with {_SWITCH}=1; ONNX "
        f"Runtime does not use it: give its profile"
    )
