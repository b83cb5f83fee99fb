"""Nodes of a Ray cluster that do jobs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.adaptors.registry import installed_products
from neural_mp.core import hardware
from neural_mp.jobs.local_worker import JobRunner
from neural_mp.jobs.worker_pool import WorkerLostError
from neural_mp.tuning.executors import executor_named
from neural_mp.tuning.executors.options import Workers
from neural_mp.tuning.executors.ray_nodes import ClusterNodes, NumericalTraits, remote
from neural_mp.tuning.job_outcome import JobOutcome

logger = logging.getLogger(__name__)

#: Seconds between two looks at how far a job is.
_LOOK = 0.5
#: Calls that the runner of a node takes at the same time: a job, and a question how far it is.
_CALLS = 2


class _NodesRunner:
    """On a node: does jobs, and collects what there is to tell of them.

    Args:
        folder: the folder that the command was started in, which names of files begin in.
        threads: threads that a job may use.
        trust: see `MixedPrecision`.
    """

    def __init__(self, folder: str, threads: int, trust: tuple[str, ...]) -> None:
        os.chdir(folder)
        self._runner = JobRunner(threads, trust)
        self._told: list[str] = []

    def run(self, job: JobOutcome, folder: Path, before: JobOutcome | None) -> JobOutcome | None:
        return self._runner.run(job, folder, before, self._told.append)

    def told(self, after: int) -> list[str]:
        return self._told[after:]


class _RayPlace:
    """One slot of a node; see `Place`."""

    def __init__(self, node: str, name: str, threads: int, trust: tuple[str, ...]) -> None:
        made = remote(_NodesRunner, node, threads, max_concurrency=_CALLS, max_restarts=0)
        self._runner: Any = made.remote(str(Path.cwd()), threads, trust)
        self._name, self._heard = name, 0

    def run(
        self, job: JobOutcome, folder: Path, before: JobOutcome | None, tell: Callable[[str], None]
    ) -> JobOutcome | None:
        import ray

        try:
            doing = self._runner.run.remote(job, folder, before)
            while not (done := ray.wait([doing], timeout=_LOOK)[0]):
                self._pass_on(tell)
            self._pass_on(tell)
            found: JobOutcome | None = ray.get(done[0])
        except ray.exceptions.RayActorError as error:
            logger.debug("a node was lost", exc_info=True)
            raise WorkerLostError(f"node {self._name} of the Ray cluster was lost") from error
        return found

    def _pass_on(self, tell: Callable[[str], None]) -> None:
        import ray

        for words in ray.get(self._runner.told.remote(self._heard)):
            self._heard += 1
            tell(words)

    def stop(self) -> None:
        """The process of a job ends with the runner that started it."""
        import ray

        ray.kill(self._runner)


def _traits() -> NumericalTraits:
    """Those of the machine that calls this, for models of every framework that it has."""
    by_framework = installed_products(hardware.detect())
    products = {f"{name} {kind}": by[kind] for name, by in by_framework.items() for kind in by}
    return NumericalTraits.of(products, [entry.package for entry in FRAMEWORKS.values()])


@contextmanager
def ray_places(
    workers: Workers, trust: tuple[str, ...], warn: Callable[[str], None]
) -> Iterator[Sequence[_RayPlace]]:
    """The slots of a cluster's nodes that are like this machine, as long as it is joined.

    Args:
        workers: the user's setting.
        trust: see `MixedPrecision`.
        warn: takes what the user should know.

    Raises:
        MissingFrameworkError: Ray is not installed.
        ConfigurationError: the cluster cannot be joined.
        TuningError: no node can do jobs.
    """
    executor_named(workers.engine).check(workers)
    nodes = ClusterNodes(workers, _traits, warn)
    try:
        slots = nodes.slots()
        if not slots:
            raise nodes.nobody("do jobs")
        yield [_RayPlace(node, nodes.name(node), nodes.threads, trust) for node, _ in slots]
    finally:
        nodes.leave()
