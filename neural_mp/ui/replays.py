"""Replays of edited plans in child processes, one at a time."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import RunInUseError
from neural_mp.util.system.environment import restore_users_environment
from neural_mp.util.system.processes import make_python_command

#: Seconds that a stopped process has to end.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class Replay:
    """State of a replay.

    Attributes:
        run: name of the run.
        predicted: predicted time as a fraction of FP32's; None without a prediction.
        message: phase of the process, or the error of a failed replay.
        trial: number of the new trial; None before, and for a failed replay.
        nsr: NSR of the outputs of the trial's model; None if not measured.
        is_running: whether the process runs.
    """

    run: str
    predicted: float | None = None
    message: str = "Starting"
    trial: int | None = None
    nsr: float | None = None
    is_running: bool = True


class Replays:
    """The replays of a server; `latest` is None before the first.

    Args:
        workspace: folder of the runs.
        trust: see `MixedPrecision`.
    """

    def __init__(self, workspace: Path, trust: tuple[str, ...] = ()) -> None:
        self.latest: Replay | None = None
        self._arguments = (str(workspace), *(f"--trust={module}" for module in trust))
        self._process: subprocess.Popen[str] | None = None
        self._starting = threading.Lock()

    def start(self, replay: Replay, plan: PrecisionPlan, edits: Mapping[str, Precision]) -> None:
        """Start a replay of an edited plan.

        Raises:
            RunInUseError: another replay is running.
        """
        with self._starting:
            if self.latest is not None and self.latest.is_running:
                raise RunInUseError(
                    f"a plan of {self.latest.run!r} is being replayed; wait until the replay ends, "
                    f"or stop it"
                )
            self._process = process = subprocess.Popen(
                make_python_command("neural_mp.ui.replay_main", replay.run, *self._arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=restore_users_environment(),
                start_new_session=True,
            )
            self.latest = replay
        assert process.stdin is not None
        request = {"plan": plan.to_dict(), "edits": {op: p.value for op, p in edits.items()}}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        threading.Thread(target=self._follow_process, args=(process, replay), daemon=True).start()

    def stop(self) -> None:
        """End the running replay, and wait for its process."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _follow_process(self, process: subprocess.Popen[str], replay: Replay) -> None:
        """Update the state by the messages of a process until its end."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                replay = replace(replay, **json.loads(line))
            except ValueError:
                continue  # incomplete last line of a killed process
            self.latest = replay
        code = process.wait()
        if replay.trial is None and code != 1:  # without a message of its own
            replay = replace(replay, message="stopped" if code < 0 else f"exit code {code}")
        self.latest = replace(replay, is_running=False)
