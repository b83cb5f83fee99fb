"""Limit of single calls of the user's code and of models, which may never return."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from types import FrameType
from typing import TypeVar

from neural_mp.core.criterion import Deadline, UnreturnedCallError
from neural_mp.util.system.watched_thread import WatchedThread

T = TypeVar("T")

#: Seconds that a call may take beyond the time limit: at least, as a fraction of the limit, and as
#: a multiple of one evaluation in FP32, which may be a single call.
MIN_GRACE_SECONDS, GRACE_RATIO, EVALUATIONS_RATIO = 10.0, 0.25, 2.0
#: Seconds between two looks at the running call.
_LOOK_SECONDS = 0.5
#: Seconds for a call that is ended to unwind; afterwards, its thread is abandoned.
_UNWIND_SECONDS = 2.0


class CallLimit:
    """Runs the parts of a run in a thread of their own, and ends calls that never return.

    A call of the user's code or of a model is ended a grace period after the time limit of the
    search, or after its own start, whichever is later; before the search begins, if it takes as
    long as the time limit and the grace period. Between calls, nothing is interrupted.

    Attributes:
        timeout: seconds of the time limit; 0 sets none, and everything runs in the thread of the
            caller.
        deadline: the time limit of the search, once that begins.
        evaluation_seconds: duration of one evaluation in FP32; 0 if unknown.
    """

    def __init__(self) -> None:
        self.timeout = 0.0
        self.deadline: Deadline | None = None
        self.evaluation_seconds = 0.0
        self._thread: WatchedThread | None = None

    @property
    def grace_seconds(self) -> float:
        """Seconds that a call may take beyond the time limit."""
        evaluations = EVALUATIONS_RATIO * self.evaluation_seconds
        return max(MIN_GRACE_SECONDS, GRACE_RATIO * self.timeout, evaluations)

    def run_part(self, part: Callable[[], T]) -> T:
        """Return the result of a part of the run.

        Raises:
            UnreturnedCallError: a call within the part did not return, and was ended.
            BaseException: whatever the part raised.
        """
        if not self.timeout or (self._thread is not None and self._thread.is_current):
            return part()
        thread = self._thread = self._thread or WatchedThread()
        try:
            future = thread.start_call(part)
            self._watch_until_done(thread, future)
        except BaseException:
            # Also Ctrl-C in this thread: what runs in the other one is of no more use.
            self._thread = None
            thread.end_call(_UNWIND_SECONDS)
            raise
        try:
            return future.result()
        finally:
            del future  # which an exception would keep alive, and be kept by

    def close(self) -> None:
        """End the thread."""
        self._thread = None

    def _watch_until_done(self, thread: WatchedThread, future: futures.Future[T]) -> None:
        seen: FrameType | None = None
        since = 0.0
        # A longer wait would delay Ctrl-C on Windows, and interrupts by other threads.
        while not futures.wait([future], _LOOK_SECONDS).done:
            now = time.monotonic()
            if self.deadline is not None and now < self.deadline.end_time:
                continue
            call = thread.find_watched_call()
            if call is not seen:
                seen, since = call, now
            if call is not None and now >= self._end_of_call(since):
                raise UnreturnedCallError(
                    f"{thread.describe_call()} did not return within the time limit of "
                    f"{self.timeout:g} s (exit_policy.timeout) and {self.grace_seconds:g} s more; "
                    f"correct what does not return, or set a longer timeout"
                )

    def _end_of_call(self, since: float) -> float:
        """Return the moment at which a call is ended that was first seen at another one."""
        if self.deadline is None:
            return since + self.timeout + self.grace_seconds
        return max(since, self.deadline.end_time) + self.grace_seconds
