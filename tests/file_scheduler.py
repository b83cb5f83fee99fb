"""Files of tests shared among processes, of which one may crash; a plugin of pytest-xdist.

pytest-xdist 3.8 runs a test again that ended its process, and shares out finished files of that
process, as work without a test: processes then wait for ever for the next test.
"""

from __future__ import annotations

import pytest
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController


class FileScheduler(LoadFileScheduling):
    """Scheduler that fails a test once if its process crashes, and runs all others."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Share out the unfinished tests of a process that ended; return the test at fault."""
        work = self.assigned_work.pop(node)
        unfinished = {file: cases for file, cases in work.items() if not all(cases.values())}
        if not unfinished:
            return None
        first = next(iter(unfinished.values()))
        crashed = next(test for test, done in first.items() if not done)
        first[crashed] = True
        self.workqueue.update(
            {file: cases for file, cases in unfinished.items() if not all(cases.values())}
        )
        for worker in self.assigned_work:
            self._reschedule(worker)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        """Assign files until the process has two tests, since the last waits for a next one."""
        if node not in self.registered_collections:  # a new process that still collects
            return
        super()._reschedule(node)
        while (
            self.workqueue
            and not node.shutting_down
            and self._pending_of(self.assigned_work[node]) < 2
        ):
            self._assign_work_unit(node)


def pytest_configure(config: pytest.Config) -> None:
    """Share out files in the order in which they were collected, not by their number of tests."""
    config.option.loadscopereorder = False


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> FileScheduler | None:
    """Return the scheduler for `--dist loadfile`, None for other modes."""
    return FileScheduler(config, log) if config.getvalue("dist") == "loadfile" else None
