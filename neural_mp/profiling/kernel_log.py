"""Which kernels ran, and how long: read from a log, or caught while PyTorch runs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path

from neural_mp.core.json_files import json_of
from neural_mp.core.plain_files import check_ends
from neural_mp.errors import KernelLogError
from neural_mp.profiling.kernel_log_capture import sieved_output
from neural_mp.profiling.kernel_log_onednn import OneDnnReader
from neural_mp.profiling.kernel_log_onnxrt import is_profile, read_profile
from neural_mp.profiling.kernel_log_sieve import Sieve
from neural_mp.profiling.kernel_records import KernelLog
from neural_mp.util.argument_checks import path_of

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
    path = path_of("the log", path_or_lines)
    try:
        check_ends(path)
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
    adaptor = importlib.import_module(f"{FRAMEWORKS['pytorch'].home}.kernel_log")
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
        content = json_of(text)
    except ValueError as error:
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
