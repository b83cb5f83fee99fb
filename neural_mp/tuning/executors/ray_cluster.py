"""Executor for the nodes of a Ray cluster."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from neural_mp.tuning.executors.contract import (
    RAY,
    RUNS_AGAIN,
    Answer,
    Task,
    Worker,
    WorkerException,
    WorkerPayload,
    Workers,
    crashed_evaluation,
)
from neural_mp.tuning.executors.queued import PendingTask, QueuedExecutor
from neural_mp.tuning.executors.ray_nodes import (
    ClusterNodes,
    Slot,
    check_answer,
    describe_machine_traits,
    parse_cluster_address,
    read_host_names,
    run_on_node,
)
from neural_mp.util.optional_packages import install_command

logger = logging.getLogger(__name__)

#: Seconds for a node to respond after losing a process.
_HEALTH_CHECK_SECONDS = 30.0

#: In a node's process: payload key → its `Worker`.
_kept: dict[str, Worker] = {}


def _evaluate_task(
    key: str, kind: type, sent: Any, threads: int, task: Task, seconds: float
) -> Answer:
    """Evaluate a task in a node's process; `sent` is in the node's store, without a copy."""
    if key not in _kept:
        _kept.clear()
        _kept[key] = Worker(kind, memoryview(sent), threads)
    return _kept[key](task, seconds)


def _check_health() -> None:
    """Do nothing: a health check."""


class RayExecutor(QueuedExecutor):
    """Nodes of a Ray cluster, with as many parallel plans as CPUs allow.

    The model is sent to every node once. Nodes that could compute other numbers than this machine
    get no plans. Plans of lost nodes run again elsewhere; plans whose process crashed have failed.
    """

    name = RAY
    options = ("address", "host_names")
    needs: ClassVar[Mapping[str, str]] = {"ray": install_command("ray")}

    @classmethod
    def check(cls, workers: Workers) -> None:
        """Check that Ray is installed, and that the address responds.

        Raises:
            MissingFrameworkError: Ray is not installed.
            ConfigurationError: no cluster at the address that this process can join, or another
                option is invalid.
        """
        address = parse_cluster_address(workers)
        read_host_names(workers)
        super().check(workers)
        check_answer(address)

    def __init__(self, work: WorkerPayload, workers: Workers, warn: Callable[[str], None]) -> None:
        super().__init__(work, workers, warn)
        self.check(workers)
        traits = partial(describe_machine_traits, work.kind)
        self._nodes = ClusterNodes(workers, traits, warn)
        import ray

        self._sent = ray.put(np.frombuffer(work.sent, np.uint8))
        self._places = self._nodes.list_slots()
        if not self._places:
            self.close()
            raise self._nodes.no_slots_error("evaluate plans")

    def list_places(self) -> Iterable[Slot]:
        """Return the slots of the nodes."""
        return self._places

    def start_task(self, slot: Slot, task: Task, seconds: float) -> Any:
        """Send a plan or shard to a node."""
        # No retries by Ray, which cannot distinguish crashes due to the plan; `collect_answer` can.
        run = run_on_node(_evaluate_task, slot[0], self.threads, max_retries=0)
        key = self._sent.hex()
        return run.remote(key, self.work.kind, self._sent, self.threads, task, seconds)

    def wait_for_any(self, handles: Collection[Any], seconds: float | None) -> Iterable[Any]:
        """Wait for at least one node."""
        import ray

        return list(ray.wait(list(handles), num_returns=1, timeout=seconds)[0])

    def stop_task(self, slot: Slot, handle: Any) -> None:
        """Kill the process of a task."""
        import ray

        ray.cancel(handle, force=True)

    def collect_answer(self, slot: Slot, handle: Any, ticket: PendingTask) -> Answer | None:
        """Return a node's answer; None to run the plan of a lost node again, up to three times."""
        import ray

        node = slot[0]
        try:
            answer: Answer = ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            return WorkerException(getattr(error, "cause", None) or error)
        except ray.exceptions.RayError as error:
            logger.debug("A task was lost", exc_info=True)
            process_died = isinstance(
                error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError
            )
            if process_died and self._is_alive(node):
                return crashed_evaluation(self._nodes.node_name(node))
            return self._handle_lost_node(node, ticket)
        if isinstance(answer, WorkerException):
            return answer
        return replace(answer, node=self._nodes.node_name(node))

    def _is_alive(self, node: str) -> bool:
        import ray

        try:
            check = run_on_node(_check_health, node, cpus=0, max_retries=0).remote()
            ray.get(check, timeout=_HEALTH_CHECK_SECONDS)
        except ray.exceptions.RayError:
            return False
        return True

    def _handle_lost_node(self, node: str, ticket: PendingTask) -> Answer | None:
        """Return None to run the plan of a lost node again, or a failure after repeated losses."""
        ticket.losses += 1
        name = self._nodes.node_name(node)
        if any(node == host for host, _ in self._places):
            self.warn(
                f"node {name} of the Ray cluster was lost; its plans run again on other nodes"
            )
        self._places = [slot for slot in self._nodes.list_slots() if slot[0] != node]
        return crashed_evaluation(name) if ticket.losses > RUNS_AGAIN else None

    def close(self) -> None:
        """Cancel running tasks; leave the cluster if joined here."""
        import ray

        for handle in self.busy_handles:
            ray.cancel(handle, force=True)
        del self._sent
        self._nodes.leave_cluster()
