"""Runs a program with oneDNN's log switched on."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from neural_mp.core.environment import users_environment
from neural_mp.errors import KernelLogError
from neural_mp.profiling.kernel_log_onednn import VARIABLES, OneDnnReader
from neural_mp.profiling.kernel_log_sieve import Sieve
from neural_mp.profiling.kernel_records import KernelLog

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
