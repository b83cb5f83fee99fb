"""Executor for the nodes of a Ray cluster whose numerics match this machine."""

from __future__ import annotations

import logging
import os
import platform
import signal
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from neural_mp.adaptors.contract import Adaptor
from neural_mp.core import hardware
from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.errors import ConfigurationError, TuningError
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
from neural_mp.util.optional_packages import install_command
from neural_mp.util.system.environment import read_package_versions
from neural_mp.util.text import format_count
from neural_mp.util.validators import boolean, validate_option

logger = logging.getLogger(__name__)

#: Timeout for a connection to the cluster's address, in seconds.
_CONNECT_SECONDS = 10.0
#: Seconds for a node to report its traits, including the import of the framework.
_TRAITS_SECONDS = 300.0
#: By default, Ray detects lost nodes only after minutes; in milliseconds except for the last two.
WATCHFUL: Mapping[str, str] = {
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: Address of a private cluster, which ends with the run.
_OWN_CLUSTER = "local"
_ANY_CLUSTER = "auto"

#: Node ID and index of a slot.
Slot = tuple[str, int]


@dataclass(frozen=True)
class NumericalTraits:
    """The properties of a machine that determine its numerics: trait → value."""

    values: Mapping[str, str]

    @classmethod
    def of_this_machine(cls, kind: type[Adaptor[Any]]) -> NumericalTraits:
        """Return the traits of this machine for the models of an adaptor."""
        adaptor = kind()
        return cls.from_accumulation(adaptor.int8_accumulation(hardware.detect()), adaptor.packages)

    @classmethod
    def from_accumulation(
        cls, accumulation: Mapping[Any, Int8Accumulation], packages: Iterable[str]
    ) -> NumericalTraits:
        """Return this machine's traits: INT8 accumulation by contraction, versions of packages."""
        kinds = ", ".join(f"{kind}: {accumulation[kind]}" for kind in sorted(accumulation))
        values = {"processor": platform.machine(), "INT8 accumulation": kinds}
        return cls({**values, **read_package_versions(("neural-mp", *packages))})

    def list_differences(self, machine: NumericalTraits) -> list[str]:
        """Return the differences from another machine, as text."""
        names = [*self.values, *(name for name in machine.values if name not in self.values)]
        return [
            f"{name} is {machine.values.get(name, 'none')}, here {self.values.get(name, 'none')}"
            for name in names
            if self.values.get(name) != machine.values.get(name)
        ]


def describe_machine_traits(kind: type[Adaptor[Any]]) -> NumericalTraits:
    """Return the traits of the calling machine for the models of an adaptor.

    Nodes get this function by name, and so run their own code.
    """
    return NumericalTraits.of_this_machine(kind)


def _report_traits(traits: Callable[[], NumericalTraits]) -> tuple[str, NumericalTraits]:
    return platform.node(), traits()


def parse_cluster_address(workers: Workers) -> str:
    """Return the cluster's address in the setting; raise `ConfigurationError` if invalid."""
    address = workers.options.get("address", _ANY_CLUSTER)
    if not isinstance(address, str) or not address or "://" in address:
        raise ConfigurationError(
            f"workers: address must be the address of a Ray cluster that includes this machine, "
            f"e.g. 10.0.0.1:6379, or auto, or local for a private cluster, got {address!r}"
        )
    return address


def check_answer(address: str) -> None:
    """Raise `ConfigurationError` if the address of a cluster does not respond."""
    host, _, port = address.rpartition(":")
    if not port.isdecimal():
        return
    try:
        # Ray itself would retry for minutes.
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise _unreachable_cluster_error(address, error) from error


def read_host_names(workers: Workers) -> bool:
    """Return whether names of nodes, which histories and results contain, include the hosts.

    Raises:
        ConfigurationError: the setting is no boolean.
    """
    return validate_option("workers: host_names", boolean, workers.options.get("host_names", False))


class ClusterNodes:
    """The nodes of a joined cluster whose traits match this machine.

    Args:
        workers: the user's setting.
        traits: returns the traits of the calling machine; called on every node.
        warn: receives warnings.

    Raises:
        ConfigurationError: the cluster cannot be joined.
    """

    def __init__(
        self, workers: Workers, traits: Callable[[], NumericalTraits], warn: Callable[[str], None]
    ) -> None:
        self.threads = workers.threads or 1
        self._count, self._traits, self._warn = workers.count, traits, warn
        self._shows_hosts = read_host_names(workers)
        #: Node → its display name; empty for rejected nodes.
        self._names: dict[str, str] = {}
        self._refused: list[str] = []
        self._own = _join_cluster(parse_cluster_address(workers))

    def list_slots(self) -> list[Slot]:
        """Return all slots of live matching nodes, one slot of each node first."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        room = {
            name: int(node["Resources"].get("CPU", 0)) // self.threads
            for name, node in alive.items()
        }
        self._query_traits([name for name in alive if room[name] and name not in self._names])
        slots = [(name, s) for name in alive if self._names.get(name) for s in range(room[name])]
        slots.sort(key=lambda slot: slot[1])
        return slots[: self._count]

    def node_name(self, node: str) -> str:
        """Return the display name of a node."""
        return self._names[node]

    def no_slots_error(self, action: str) -> TuningError:
        """Return the error for a cluster without a slot for an action."""
        why = "; ".join(self._refused) or f"no node has {format_count(self.threads, 'CPU')}"
        return TuningError(f"no node of the Ray cluster can {action}: {why}")

    def _query_traits(self, nodes: list[str]) -> None:
        """Query the traits of nodes, and warn of those that differ from this machine."""
        import ray

        local, done = self._traits(), []
        queries = {run_on_node(_report_traits, n, cpus=0).remote(self._traits): n for n in nodes}
        if queries:
            done, _ = ray.wait(list(queries), num_returns=len(queries), timeout=_TRAITS_SECONDS)
        for reference, node in queries.items():
            self._names[node] = ""
            name = node[:8]
            try:
                if reference not in done:
                    raise TimeoutError(f"no response within {_TRAITS_SECONDS:g} s")
                host, traits = ray.get(reference)
            except Exception as error:
                # Nodes without a package raise arbitrary import errors.
                logger.debug("A node did not report its traits", exc_info=True)
                reason = next(iter(str(getattr(error, "cause", error)).splitlines()), "no reason")
                self._record_refusal(f"node {name} of the Ray cluster is excluded: {reason}")
                continue
            if self._shows_hosts:
                name = f"{host} {name}"
            differences = local.list_differences(traits)
            if differences:
                reason = "; ".join(differences)
                self._record_refusal(f"node {name} of the Ray cluster is excluded: {reason}")
            else:
                self._names[node] = name

    def _record_refusal(self, message: str) -> None:
        self._refused.append(message)
        self._warn(message)

    def leave_cluster(self) -> None:
        """Leave the cluster, if joined here."""
        import ray

        if self._own:
            ray.shutdown()


def run_on_node(subject: object, node: str, cpus: int, **options: object) -> Any:
    """Return a function or class that runs on one node only."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    affinity = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=cpus, scheduling_strategy=affinity, **options)(subject)


def _join_cluster(address: str) -> bool:
    """Connect to the cluster; return False if already connected."""
    import ray

    if ray.is_initialized():
        return False
    for name, value in WATCHFUL.items():
        os.environ.setdefault(name, value)
    quiet = {"log_to_driver": False, "configure_logging": False}
    if address == _OWN_CLUSTER:
        quiet["include_dashboard"] = False
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, **quiet)
    except Exception as error:
        # Ray raises ConnectionError, RuntimeError, ValueError and its own errors.
        raise _unreachable_cluster_error(address, error) from error
    finally:
        if callable(handler) and signal.getsignal(signal.SIGTERM) is not handler:
            signal.signal(signal.SIGTERM, handler)  # Ray has replaced the handler of the command
    return True


def _unreachable_cluster_error(address: str, error: Exception) -> ConfigurationError:
    reason = next(iter(str(error).splitlines()), "no reason given")
    return ConfigurationError(
        f"workers: no Ray cluster at address {address!r} includes this machine: "
        f"{type(error).__name__}: {reason}; start a cluster with `ray start --head`, or set the "
        f"address to local"
    )


#: Seconds for a node to respond after losing a process; a busy one starts another in half a minute.
_HEALTH_CHECK_SECONDS = 120.0

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
