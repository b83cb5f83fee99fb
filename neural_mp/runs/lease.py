"""Table of runs in a storage, and the lease of a run: at most one process writes to it."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cache
from typing import TYPE_CHECKING, Any

from neural_mp.errors import HistoryError, NeuralMPError, RunInUseError, one_line
from neural_mp.runs.sqlite_checks import get_database_file
from neural_mp.util.json_fields import JsonFields
from neural_mp.util.system.processes import ProcessIdentity

if TYPE_CHECKING:
    from sqlalchemy import Engine, Table

logger = logging.getLogger(__name__)

RUN_TABLE = "neural_mp_runs"
#: Seconds between two heartbeats.
_HEARTBEAT_SECONDS = 5.0
#: Timeout for the thread to end with the lease, in seconds.
_JOIN_SECONDS = 1.0
#: Seconds without a heartbeat after which a process on another machine counts as dead.
_LEASE_TIMEOUT_SECONDS = 60.0
#: Seconds between two checks for a heartbeat.
_CHECK_SECONDS = 0.5
#: Lost races for the lease before the row counts as damaged.
_ATTEMPTS = 100
#: Fix in error messages.
_OWN_RUN = "start a new run without resume, or use another workspace"

#: Tokens of all leases of this process.
_held: set[str] = set()


@cache
def _build_run_table() -> Table:
    import sqlalchemy as sql

    return sql.Table(
        RUN_TABLE,
        sql.MetaData(),
        sql.Column("run_id", sql.Integer, primary_key=True),
        sql.Column("name", sql.String(512), nullable=False, unique=True),
        sql.Column("fingerprint", sql.Text),
        sql.Column("lease", sql.Text),
    )


def create_run_table(engine: Engine) -> None:
    """Create the table if it does not exist."""
    from sqlalchemy.schema import CreateTable

    with engine.begin() as connection:
        connection.execute(CreateTable(_build_run_table(), if_not_exists=True))


def run_rows(engine: Engine, prefix: str = "") -> list[tuple[str, Any]]:
    """Return name and fingerprint of runs whose names start with `prefix`, oldest first."""
    import sqlalchemy as sql

    columns = _build_run_table().c
    query = sql.select(columns.name, columns.fingerprint).order_by(columns.run_id)
    if prefix:
        query = query.where(columns.name.startswith(prefix, autoescape=True))
    with engine.connect() as connection:
        return [(str(name), about) for name, about in connection.execute(query)]


@dataclass(frozen=True)
class RunRow:
    """The row of one run."""

    engine: Engine
    name: str

    def insert_row(self, fingerprint: Mapping[str, str], lease: str) -> None:
        """Insert the row of a new run."""
        row = {"name": self.name, "fingerprint": json.dumps(dict(fingerprint)), "lease": lease}
        with self.engine.begin() as connection:
            connection.execute(_build_run_table().insert().values(row))

    def read_lease(self) -> str | None:
        """Return the lease; None if the run is free."""
        import sqlalchemy as sql

        columns = _build_run_table().c
        with self.engine.connect() as connection:
            query = sql.select(columns.lease).where(columns.name == self.name)
            value: str | None = connection.execute(query).scalar()
            return value

    def replace_lease(self, expected: str | None, replacement: str | None) -> bool:
        """Write the lease if it still equals `expected`; return whether it did."""
        table = _build_run_table()
        same = (table.c.name == self.name) & (table.c.lease == expected)
        with self.engine.begin() as connection:
            done = connection.execute(table.update().where(same).values(lease=replacement))
            return bool(done.rowcount)


@dataclass(frozen=True)
class _LeaseOwner(JsonFields):
    """The owner of a lease.

    Attributes:
        process: the process.
        since: date and time, UTC.
        token: distinguishes leases of one process.
        beats: heartbeats so far.
        file: number of the SQLite file in its file system; 0 for other databases.
    """

    process: ProcessIdentity
    since: str
    token: str
    beats: int = 0
    file: int = 0

    @classmethod
    def of_this_process(cls, file: int) -> _LeaseOwner:
        since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(ProcessIdentity.of_this_process(), since, uuid.uuid4().hex, file=file)

    @classmethod
    def from_text(cls, text: str) -> _LeaseOwner:
        """Parse a stored lease; a damaged lease has an owner that is not alive."""
        try:
            return cls.from_dict(json.loads(text))
        except (NeuralMPError, RecursionError, TypeError, ValueError):
            return cls(ProcessIdentity("", 0, 0.0), "", "")

    @property
    def as_text(self) -> str:
        """The lease as stored in the row."""
        return json.dumps(self.to_dict())

    @property
    def is_alive(self) -> bool | None:
        """Whether the owner still has the lease; None if not observable from this machine."""
        if not self.token:
            return False
        return self.token in _held if self.process.is_this_one else self.process.is_alive

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


def _number_of_file(engine: Engine) -> int:
    """Return the number of a database's file, which a copy does not have; 0 without a file."""
    file = get_database_file(engine.url)
    try:
        return 0 if file is None else file.stat().st_ino
    except OSError:
        return 0


class RunLease:
    """The exclusive right to write to a run, until release or the end of the process.

    A copy of a SQLite file has no owner: the process writes to the original.

    A killed process releases nothing; the next process detects its end by process ID and start
    time. A process on another machine is not observable; its heartbeats are.

    `fingerprint` is the subject of a new run; None for an existing run.

    Raises:
        RunInUseError: another owner has the lease, in this process or another process.
    """

    def __init__(
        self, engine: Engine, name: str, fingerprint: Mapping[str, str] | None = None
    ) -> None:
        self._heartbeat = _Heartbeat(RunRow(engine, name), fingerprint)
        self.release = weakref.finalize(self, self._heartbeat.stop_beating)

    def check_ownership(self) -> None:
        """Check that no other process has taken over the lease.

        Raises:
            RunInUseError: another process has, since heartbeats were missing for too long.
        """
        self._heartbeat.check_ownership()


def is_leased(engine: Engine, name: str) -> bool:
    """Whether a process holds the lease of a run; also a process that cannot be observed here."""
    lease = RunRow(engine, name).read_lease()
    return lease is not None and _LeaseOwner.from_text(lease).is_alive is not False


class _Heartbeat:
    """A held lease, renewed by a thread."""

    def __init__(self, row: RunRow, fingerprint: Mapping[str, str] | None) -> None:
        self._row = row
        self._owner = _LeaseOwner.of_this_process(_number_of_file(row.engine))
        self._ended, self._lost = threading.Event(), False
        # Reentrant: garbage collection may call `stop_beating` in a thread that holds the lock.
        self._writing = threading.RLock()
        _held.add(self._owner.token)
        try:
            if fingerprint is None:
                self._acquire_lease()
            else:
                row.insert_row(fingerprint, self._owner.as_text)
        except BaseException:
            _held.discard(self._owner.token)
            raise
        self._thread = threading.Thread(target=self._renew_until_end, daemon=True)
        self._thread.start()

    def _acquire_lease(self) -> None:
        for _ in range(_ATTEMPTS):
            lease = self._row.read_lease()
            if lease is not None:
                self._check_dead(lease)
            if self._row.replace_lease(lease, self._owner.as_text):
                return  # otherwise another process was faster: check that process, too
        raise HistoryError(
            f"the lease of run {self._row.name!r} cannot be acquired: its row in the table "
            f"{RUN_TABLE} is damaged or missing; {_OWN_RUN}"
        )

    def _check_dead(self, lease: str) -> None:
        holder = _LeaseOwner.from_text(lease)
        if holder.file and self._owner.file and holder.file != self._owner.file:
            return  # a copy of the file that the holder writes to
        alive = holder.is_alive
        if alive is None:
            logger.warning(
                "Waiting up to %g s for a heartbeat of %s, the owner of run %r on another machine.",
                _LEASE_TIMEOUT_SECONDS,
                holder,
                self._row.name,
            )
            alive = self._has_live_owner(lease)
        if alive:
            raise self._in_use(holder)

    def _has_live_owner(self, lease: str) -> bool:
        """Whether the owner of a lease sends a heartbeat within the timeout."""
        until = time.monotonic() + _LEASE_TIMEOUT_SECONDS
        while time.monotonic() < until:
            time.sleep(_CHECK_SECONDS)
            if self._row.read_lease() != lease:
                return True
        return False

    def _in_use(self, holder: _LeaseOwner) -> RunInUseError:
        return RunInUseError(
            f"run {self._row.name!r} is in use by {holder}; wait until that process ends, or "
            f"{_OWN_RUN}"
        )

    def _renew_until_end(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            with self._writing:
                if not self._ended.is_set():
                    self._renew_lease()

    def _renew_lease(self) -> None:
        renewed = replace(self._owner, beats=self._owner.beats + 1)
        try:
            owned = self._row.replace_lease(self._owner.as_text, renewed.as_text)
        except Exception:
            # Any database error: transient, or the run itself will report it.
            logger.debug("run %r: heartbeat failed", self._row.name, exc_info=True)
            return
        if owned:
            self._owner = renewed
        else:
            self._lost = True
            self._ended.set()

    def check_ownership(self) -> None:
        if not self._lost:
            return
        try:
            lease = self._row.read_lease()
        except Exception as error:
            # Any database error.
            raise HistoryError(
                f"run {self._row.name!r} cannot be read from its storage: {one_line(error)}"
            ) from error
        if lease is None:
            raise HistoryError(f"run {self._row.name!r} was deleted from its storage; {_OWN_RUN}")
        raise self._in_use(_LeaseOwner.from_text(lease))

    def stop_beating(self) -> None:
        if self._owner.process.pid != os.getpid():
            return  # a fork of the owner
        with self._writing:
            self._ended.set()
            try:
                self._row.replace_lease(self._owner.as_text, None)
            except Exception:
                # Any database error: the lease ends with the process.
                logger.debug("run %r: release failed", self._row.name, exc_info=True)
            _held.discard(self._owner.token)
        if self._thread is not threading.current_thread():
            self._thread.join(_JOIN_SECONDS)
