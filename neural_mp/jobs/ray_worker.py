"""Execution of jobs on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.registry import probe_installed_accumulation
from neural_mp.core import hardware
from neural_mp.jobs.worker_pool import JobRunner, WorkerLostError
from neural_mp.tuning.executors import get_executor_named
from neural_mp.tuning.executors.contract import Workers
from neural_mp.tuning.executors.ray_cluster import ClusterNodes, NumericalTraits, run_on_node
from neural_mp.tuning.job_outcome import JobOutcome

logger = logging.getLogger(__name__)

#: Seconds between two polls of the progress.
_LOOK = 0.5
#: Concurrent calls of a node's runner: a job, and progress queries.
_CALLS = 2


class _NodesRunner:
    """Ray actor on a node that runs jobs and collects their progress messages.

    Args:
        folder: working directory of the command, for relative paths.
        threads: threads per job.
        trust: see `MixedPrecision`.
    """

    def __init__(self, folder: str, threads: int, trust: tuple[str, ...]) -> None:
        os.chdir(folder)
        self._runner = JobRunner(threads, trust)
        self._told: list[str] = []

    def run_job(self, job: JobOutcome, folder: Path, prior: JobOutcome | None) -> JobOutcome | None:
        return self._runner.run_job(job, folder, prior, self._told.append)

    def read_messages(self, start: int) -> list[str]:
        return self._told[start:]


class _RayPlace:
    """Slot of a node; see `JobWorker`."""

    def __init__(self, node: str, name: str, threads: int, trust: tuple[str, ...]) -> None:
        runner = run_on_node(_NodesRunner, node, threads, max_concurrency=_CALLS, max_restarts=0)
        self._runner: Any = runner.remote(str(Path.cwd()), threads, trust)
        self._name, self._heard = name, 0

    def run_job(
        self, job: JobOutcome, folder: Path, prior: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        import ray

        try:
            doing = self._runner.run_job.remote(job, folder, prior)
            while not (done := ray.wait([doing], timeout=_LOOK)[0]):
                self._pass_on(tell)
            self._pass_on(tell)
            outcome: JobOutcome | None = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            logger.debug("a node was lost", exc_info=True)
            raise WorkerLostError(f"node {self._name} of the Ray cluster was lost") from error
        return outcome

    def _pass_on(self, tell: Callable[[str], None]) -> None:
        import ray

        for message in ray.get(self._runner.read_messages.remote(self._heard)):
            self._heard += 1
            tell(message)

    def stop_job(self) -> None:
        """Kill the runner; the process of its job ends with it."""
        import ray

        ray.kill(self._runner)


def _describe_machine_traits() -> NumericalTraits:
    by_framework = probe_installed_accumulation(hardware.detect())
    products = {f"{name} {kind}": by[kind] for name, by in by_framework.items() for kind in by}
    return NumericalTraits.from_accumulation(
        products, [entry.package for entry in FRAMEWORKS.values()]
    )


@contextmanager
def connect_ray_places(
    workers: Workers, trust: tuple[str, ...], warn: Callable[[str], None]
) -> Iterator[Sequence[_RayPlace]]:
    """Yield the slots of cluster nodes equivalent to this machine, while connected.

    Raises:
        MissingFrameworkError: Ray is not installed.
        ConfigurationError: the connection to the cluster fails.
        TuningError: no node can run jobs.
    """
    get_executor_named(workers.engine).check(workers)
    nodes = ClusterNodes(workers, _describe_machine_traits, warn)
    try:
        slots = nodes.list_slots()
        if not slots:
            raise nodes.no_slots_error("do jobs")
        yield [_RayPlace(node, nodes.node_name(node), nodes.threads, trust) for node, _ in slots]
    finally:
        nodes.leave_cluster()
