"""Lease of a run: at most one process writes to a run, recorded in the run's row."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from neural_mp.errors import HistoryError, RunInUseError, one_line
from neural_mp.runs.run_table import RUN_TABLE, RunRow
from neural_mp.util.processes import ProcessIdentity

if TYPE_CHECKING:
    from sqlalchemy import Engine

logger = logging.getLogger(__name__)

#: Seconds between two heartbeats.
_HEARTBEAT_SECONDS = 5.0
#: Seconds without a heartbeat after which a process on another machine counts as dead.
_LEASE_TIMEOUT_SECONDS = 60.0
#: Seconds between two checks for a heartbeat.
_LOOK = 0.5

#: Lost races for the lease before the row counts as damaged.
_ATTEMPTS = 100

#: Tokens of all leases of this process.
_held: set[str] = set()


@dataclass(frozen=True)
class _Holder:
    """The owner of a lease.

    Attributes:
        process: the process.
        since: date and time, UTC.
        token: distinguishes leases of one process.
        beats: heartbeats so far.
    """

    process: ProcessIdentity
    since: str
    token: str
    beats: int = 0

    @classmethod
    def new(cls) -> _Holder:
        since = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
        return cls(ProcessIdentity.current(), since, uuid.uuid4().hex)

    @classmethod
    def read(cls, text: str) -> _Holder:
        """Read the owner from a lease; a damaged lease has an owner that is not alive."""
        try:
            values: Mapping[str, Any] = json.loads(text)
            process = ProcessIdentity.from_dict(values["process"])
            return cls(process, str(values["since"]), str(values["token"]), int(values["beats"]))
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            return cls(ProcessIdentity("", "", 0, 0.0), "", "")

    @property
    def text(self) -> str:
        """The lease as stored in the row."""
        return json.dumps(asdict(self))

    @property
    def lives(self) -> bool | None:
        """Whether the owner still has the lease; None if not observable from this machine."""
        if not self.token:
            return False
        return self.token in _held if self.process.is_this_one else self.process.is_alive

    def __str__(self) -> str:
        return f"{self.process} since {self.since}"


class RunClaim:
    """A lease: the exclusive right to write to a run, until release or the end of the process.

    A killed process releases nothing; the next process detects its end by process ID and start
    time. A process on another machine is not observable; its heartbeats are.

    Args:
        engine: engine of the storage with the run.
        name: name of the run.
        fingerprint: subject of a new run; None for an existing run.

    Raises:
        RunInUseError: another owner has the lease, in this process or another process.
    """

    def __init__(
        self, engine: Engine, name: str, fingerprint: Mapping[str, str] | None = None
    ) -> None:
        self._beating = _Beating(RunRow(engine, name), fingerprint)
        self.release = weakref.finalize(self, self._beating.end)

    def check(self) -> None:
        """Check that no other process has taken over the lease.

        Raises:
            RunInUseError: another process has, since heartbeats were missing for too long.
        """
        self._beating.check()


class _Beating:
    """A held lease, renewed by a heartbeat thread."""

    def __init__(self, row: RunRow, fingerprint: Mapping[str, str] | None) -> None:
        self._row, self._name = row, row.name
        self._holder = _Holder.new()
        self._ended, self._lost = threading.Event(), False
        # Reentrant: garbage collection may call `end` in a thread that holds the lock.
        self._writing = threading.RLock()
        _held.add(self._holder.token)
        try:
            if fingerprint is None:
                self._take()
            else:
                row.insert(fingerprint, self._holder.text)
        except BaseException:
            _held.discard(self._holder.token)
            raise
        threading.Thread(target=self._beat, daemon=True).start()

    def _take(self) -> None:
        for _ in range(_ATTEMPTS):
            if self._took():
                return
            # another process was faster; find out which
        raise HistoryError(
            f"the run {self._name!r} cannot be claimed: its row in the table {RUN_TABLE} is "
            f"damaged or gone; begin a run of its own without resume, or take another workspace"
        )

    def _took(self) -> bool:
        found = self._row.lease()
        if found is not None:
            self._check_dead(found)
        return self._row.replace_lease(found, self._holder.text)

    def _check_dead(self, found: str) -> None:
        other = _Holder.read(found)
        lives = other.lives
        if lives is None:
            logger.warning(
                "%s was in use by %s, which cannot be seen from here; this takes up to %g s",
                *(self._name, other, _LEASE_TIMEOUT_SECONDS),
            )
            lives = self._changes(found)
        if lives:
            raise self._in_use(other)

    def _changes(self, found: str) -> bool:
        """Whether the owner sends a heartbeat within the timeout."""
        until = time.monotonic() + _LEASE_TIMEOUT_SECONDS
        while time.monotonic() < until:
            time.sleep(_LOOK)
            if self._row.lease() != found:
                return True
        return False

    def _in_use(self, other: _Holder) -> RunInUseError:
        return RunInUseError(
            f"the run {self._name!r} is in use by {other}; wait until it ends, begin a run of its "
            f"own without resume, or take another workspace"
        )

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT_SECONDS):
            with self._writing:
                if not self._ended.is_set():
                    self._give_sign()

    def _give_sign(self) -> None:
        told = replace(self._holder, beats=self._holder.beats + 1)
        try:
            kept = self._row.replace_lease(self._holder.text, told.text)
        except Exception:
            # Any database error: transient, or the run itself will report it.
            logger.debug("no sign of life could be given", exc_info=True)
            return
        if kept:
            self._holder = told
        else:
            self._lost = True
            self._ended.set()

    def check(self) -> None:
        if self._lost:
            found = self._holder_now()
            if found is not None:
                raise self._in_use(_Holder.read(found))
            raise HistoryError(f"the run {self._name!r} is gone from its storage")

    def _holder_now(self) -> str | None:
        try:
            return self._row.lease()
        except Exception as error:
            # Any database error.
            raise HistoryError(
                f"the run {self._name!r} cannot be read from its storage: {one_line(error)}"
            ) from error

    def end(self) -> None:
        if self._holder.process.pid != os.getpid():
            return  # a fork of the owner
        with self._writing:
            self._ended.set()
            try:
                self._row.replace_lease(self._holder.text, None)
            except Exception:
                # Any database error: the lease ends with the process.
                logger.debug("a run could not be released", exc_info=True)
            _held.discard(self._holder.token)
