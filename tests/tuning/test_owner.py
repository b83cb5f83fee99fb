"""Nothing outlives a run that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux's kernel"),
]

#: A run with one worker that has forked, and then never gives back the interpreter.
RUN = """
import ctypes, os, sys, time
from dataclasses import dataclass
from types import SimpleNamespace
import cloudpickle
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.tuning.executors import WorkerPayload
from neural_mp.tuning.executors.contract import _Package
from neural_mp.tuning.executors.local import LocalExecutor
from neural_mp.tuning.executors.contract import Workers

@dataclass
class Stuck:
    @property
    def model(self):
        return SimpleNamespace(adaptor=OnnxRuntimeAdaptor())

    def __call__(self, plan, deadline):
        child = os.fork()
        if not child:
            time.sleep(600)
        open("told", "w").write(f"{os.getpid()} {child} ")
        ctypes.PyDLL(None).sleep(600)

work = WorkerPayload(OnnxRuntimeAdaptor, cloudpickle.dumps(_Package(None, Stuck())))
executor = LocalExecutor(work, Workers(count=1), print)
executor.assessment(executor.submit("plan", 0.0))
"""


def _left(pids):
    commands = []
    for pid in pids:
        try:
            process = psutil.Process(pid)
            if process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline())[:80])
        except psutil.NoSuchProcess:
            continue
    return commands


def test_a_worker_that_holds_the_interpreter_and_its_child_end_with_the_run(tmp_path):
    semaphores = set(Path("/dev/shm").iterdir())
    run = subprocess.Popen([sys.executable, "-c", RUN], cwd=tmp_path)
    until = time.monotonic() + 600
    while not (tmp_path / "told").exists() or not (tmp_path / "told").read_text().endswith(" "):
        assert run.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    descendants = [process.pid for process in psutil.Process(run.pid).children(recursive=True)]
    assert {int(pid) for pid in (tmp_path / "told").read_text().split()} <= {*descendants}
    run.send_signal(signal.SIGKILL)
    run.wait()
    until = time.monotonic() + 600
    while _left(descendants) and time.monotonic() < until:
        time.sleep(0.05)
    assert _left(descendants) == []
    created = set(Path("/dev/shm").iterdir()) - semaphores
    mine = [path for path in created if str(run.pid) in path.name]
    assert mine == []
