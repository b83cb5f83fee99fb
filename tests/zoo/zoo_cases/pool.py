"""A process that has imported the packages, and forks a child for each job.

A child is ended at the limit of its CPU seconds, or of its wall time if the child waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from zoo_cases.decoders import DECODER_STAGES
from zoo_cases.stages import STAGES

#: Wall seconds that a child may take, as a multiple of its CPU seconds.
WALL_RATIO = 6.0
_POLL_SECONDS = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


class Pool:
    """A forking process of one source, started at the first job."""

    def __init__(self, program: Path, kind: str, packages: list[str]) -> None:
        path = os.pathsep.join([*packages, os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, str(program), "--pool", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A fork has none of the threads of a pool that its parent may have started.
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run a job in a child of the pool; return its row."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return dict(json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def serve() -> None:
    """Answer the jobs of standard input, one row per line."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    for line in sys.stdin:
        print(json.dumps(_row_of(json.loads(line))), file=answers, flush=True)


def _row_of(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        child = os.fork()
        if child == 0:
            _run_in_child(job, Path(file.name))
        ended = _awaited(child, job["limit_seconds"])
        content = Path(file.name).read_text(encoding="utf-8")
    if not content:
        return {"ended": ended or "the process ended without a result"}
    return dict(json.loads(content))


def _run_in_child(job: dict[str, Any], file: Path) -> None:
    try:
        os.setsid()
        Path("/proc/self/clear_refs").write_text("5")  # peak memory begins anew
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.dup2(2, 1)
        try:
            stages = {**STAGES, **DECODER_STAGES}
            row = stages[job["stage"]](job, Path(job["folder"]))
        except BaseException:  # noqa: BLE001 - nobody sees an error of a process that ends
            row = {"crashed": traceback.format_exc()[-3000:]}
        file.write_text(json.dumps(row), encoding="utf-8")
    finally:
        os._exit(0)


def _awaited(child: int, limit: float) -> str:
    """Wait for a child; return why it was ended, or how it failed."""
    started = time.monotonic()
    while True:
        pid, status, _ = os.wait4(child, os.WNOHANG)
        if pid:
            return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else ""
        if _cpu_seconds(child) > limit or time.monotonic() - started > limit * WALL_RATIO:
            os.killpg(child, signal.SIGKILL)
            os.wait4(child, 0)
            return f"limit of {limit:.0f} CPU seconds"
        time.sleep(_POLL_SECONDS)


def _cpu_seconds(child: int) -> float:
    fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / _TICKS
