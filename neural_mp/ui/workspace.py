"""The runs of a workspace, as far as a list of them shows, and replays of their edited plans.

Replays run in child processes, one at a time.
"""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import HistoryError, NeuralMPError, RunInUseError
from neural_mp.runs.history import HISTORY_FILE, RunStore, get_storage_url, open_runs
from neural_mp.runs.report import RunRecord, RunSource
from neural_mp.util.system.environment import restore_users_environment
from neural_mp.util.system.processes import make_python_command
from neural_mp.util.validators import file_path, validate_option

#: Number of runs listed, and searched; the latest.
MAX_RUNS = 200
#: Name of the plan of the result, among those of trials.
RESULT = "result"
#: Seconds that a stopped process has to end.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class StoredRun:
    """A run as stored at one moment.

    Attributes:
        name: name of the run in the workspace.
        record: all stored data; None for a run without a readable description.
        is_in_use: whether a process writes to the run.
        problem: reason for a missing record; otherwise empty.
        source: the options of the run as text; None if these are objects in Python.
    """

    name: str
    record: RunRecord | None
    is_in_use: bool = False
    problem: str = ""
    source: RunSource | None = None

    def require_record(self) -> RunRecord:
        """Return the record.

        Raises:
            HistoryError: the run has none.
        """
        if self.record is None:
            raise HistoryError(f"the run {self.name!r} cannot be shown: {self.problem}")
        return self.record

    def require_source(self) -> RunSource:
        """Return the options of the run.

        Raises:
            HistoryError: the run was started with objects in Python.
        """
        if self.source is None:
            raise HistoryError(
                f"the run {self.name!r} was started with objects in Python, which are not stored; "
                f"convert the model there, with convert_with_plan"
            )
        return self.source

    @property
    def default_base(self) -> str:
        """Name of the plan to edit first: `result`, or the number of the closest trial."""
        record = self.require_record()
        if record.trials and not (record.ending and len(record.ending.plan)):
            return str(min(record.trials, key=lambda t: (not t.met, t.ranking_loss)).number)
        return RESULT

    def get_plan(self, base: str) -> PrecisionPlan:
        """Return the plan of the result, or of the trial of a number.

        Raises:
            HistoryError: there is no such trial.
        """
        record = self.require_record()
        if base == RESULT:
            return PrecisionPlan() if record.ending is None else record.ending.plan
        plan = next((trial.plan for trial in record.trials if str(trial.number) == base), None)
        if plan is None:
            raise HistoryError(f"the run {self.name!r} has no trial of number {base!r}")
        return plan


@dataclass
class Workspace:
    """The runs of a folder; records that cannot have changed are read once.

    Raises:
        HistoryError: the folder has no history of runs.
    """

    folder: Path
    _listed: tuple[object, list[StoredRun]] = field(default=(None, []), repr=False)
    _read: dict[str, tuple[object, StoredRun]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        validate_option("the workspace", file_path, self.folder)
        if not (self.folder / HISTORY_FILE).is_file():
            raise HistoryError(
                f"{str(self.folder)!r} contains no runs; give the workspace of a run (default: "
                f"neural_mp_workspace)"
            )

    def list_runs(self) -> list[StoredRun]:
        """Return the latest runs, the newest first.

        Raises:
            HistoryError: the history cannot be read.
        """
        files = (self.folder / f"{HISTORY_FILE}{suffix}" for suffix in ("", "-wal"))
        state = [
            (s.st_mtime_ns, s.st_size) for file in files if file.exists() for s in [file.stat()]
        ]
        state_before, runs = self._listed
        # A process that is killed leaves the file as it is.
        if state_before != state or any(run.is_in_use for run in runs):
            with open_runs(get_storage_url(self.folder), MAX_RUNS) as stores:
                runs = [self._read_run(store) for store in stores]
            self._listed = state, runs
        return runs

    def get_run(self, name: str) -> StoredRun:
        """Return one of the runs.

        Raises:
            HistoryError: there is no such run.
        """
        with open_runs(get_storage_url(self.folder), 1, name) as stores:
            if not stores:
                raise HistoryError(f"there is no run {name!r} in {str(self.folder)!r}")
            return self._read_run(stores[0])

    def _read_run(self, store: RunStore) -> StoredRun:
        is_in_use = store.is_in_use  # a query, as its answer changes
        state = (store.trial_count, store.has_ended, is_in_use)
        state_before, run = self._read.get(store.name, (None, None))
        if run is None or state_before != state or is_in_use:
            run = _build_run(store, is_in_use)
            self._read[store.name] = state, run
        return run


def _build_run(store: RunStore, is_in_use: bool) -> StoredRun:
    try:
        return StoredRun(store.name, store.read_record(), is_in_use, source=store.source)
    except NeuralMPError as error:
        return StoredRun(store.name, None, is_in_use, str(error))


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
