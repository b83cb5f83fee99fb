"""Tasks on the nodes of a Ray cluster."""

from __future__ import annotations

import logging
import os
import platform
import socket
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from neural_mp.adaptors.contract import Adaptor
from neural_mp.core import hardware
from neural_mp.core.grammar import counted
from neural_mp.errors import ConfigurationError, TuningError
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.assessment import Assessment
from neural_mp.tuning.executors.contract import Answer, Raised, Work, Worker, died
from neural_mp.tuning.executors.queued import QueuedExecutor, Ticket
from neural_mp.tuning.recording import versions_of
from neural_mp.tuning.workers import Workers

logger = logging.getLogger(__name__)

#: How often a plan is run again whose node was lost.
_RUNS_AGAIN = 3
#: Seconds in which somebody has to answer at the address of a cluster.
_ANSWER = 10.0
#: Seconds a node has to introduce itself; it imports the framework for that.
_INTRODUCTION = 120.0
#: Seconds in which a node that lost a process shows that it is alive itself.
_SIGN_OF_LIFE = 30.0
#: Ray looks for nodes that fell silent only after minutes otherwise; milliseconds but for the last.
WATCHFUL: Mapping[str, str] = {
    "RAY_grpc_client_keepalive_time_ms": "10000",
    "RAY_grpc_client_keepalive_timeout_ms": "10000",
    "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "5000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
#: An address that stands for a cluster of one's own, which ends with the run.
_OWN_CLUSTER = "local"
_ANY_CLUSTER = "auto"

#: In a process of a node: the key of the work it has, and what evaluates.
_kept: dict[str, Worker] = {}


@dataclass(frozen=True)
class Traits:
    """What decides on the numbers that a machine computes.

    Attributes:
        values: trait → what the machine has.
    """

    values: Mapping[str, str]

    @classmethod
    def here(cls, kind: type[Adaptor[Any]]) -> Traits:
        """Those of this machine, for the models of an adaptor."""
        adaptor = kind()
        products = adaptor.kernel_products(hardware.detect())
        values = {
            "processor": platform.machine(),
            "byte products": ", ".join(f"{k}: {products[k]}" for k in sorted(products)),
        }
        return cls({**values, **versions_of(("neural-mp", *adaptor.packages))})

    def differences(self, other: Traits) -> list[str]:
        """Where another machine is different, in words."""
        names = [*self.values, *(name for name in other.values if name not in self.values)]
        return [
            f"its {name} is {other.values.get(name, 'none')}, here {self.values.get(name, 'none')}"
            for name in names
            if self.values.get(name) != other.values.get(name)
        ]


def _introduce(kind: type[Adaptor[Any]]) -> tuple[str, Traits]:
    return platform.node(), Traits.here(kind)


def _evaluate(
    key: str, kind: type, sent: Any, threads: int, plan: ResolvedPlan, seconds: float
) -> Answer:
    """In a process of a node; the array `sent` lies in the node's own store, and is not copied."""
    if key not in _kept:
        _kept.clear()
        _kept[key] = Worker(kind, memoryview(sent), threads)
    return _kept[key](plan, seconds)


def _show_life() -> None:
    """A task that ends at once."""


class RayExecutor(QueuedExecutor):
    """Nodes of a Ray cluster, as many plans at a time as they have CPUs.

    The model goes to every node once. A node whose numbers could differ from this machine's gets
    no plan. A plan whose node is lost runs again elsewhere; a plan whose process dies has failed.
    """

    name = "ray"
    options = ("address",)
    needs: ClassVar[Mapping[str, str]] = {"ray": "pip install 'neural-mp[ray]'"}

    @classmethod
    def check(cls, workers: Workers) -> None:
        """See that Ray is there, and that somebody answers at the address.

        Raises:
            MissingFrameworkError: Ray is not installed.
            ConfigurationError: the address is no address of a cluster that this process can join.
        """
        address = workers.options.get("address", _ANY_CLUSTER)
        if not isinstance(address, str) or not address or "://" in address:
            raise ConfigurationError(
                f"workers: address must be that of a Ray cluster with this machine among its "
                f"nodes, such as 10.0.0.1:6379, or auto, or local for a cluster of its own; "
                f"got {address!r}"
            )
        super().check(workers)
        host, _, port = address.rpartition(":")
        if not port.isdecimal():
            return
        try:
            # Ray itself goes on asking for minutes.
            socket.create_connection((host.strip("[]"), int(port)), _ANSWER).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error

    def __init__(self, work: Work, workers: Workers, warn: Callable[[str], None]) -> None:
        super().__init__(work, workers, warn)
        self.check(workers)
        self._own = self._join()
        import ray

        self.threads = workers.threads or 1
        self._traits = Traits.here(work.kind)
        self._sent = ray.put(np.frombuffer(work.sent, np.uint8))
        #: Node → its name for people; empty for one that gets no work.
        self._nodes: dict[str, str] = {}
        self._refused: list[str] = []
        self._places = self._found_places()
        if not self._places:
            self.close()
            why = "; ".join(self._refused) or f"none has {counted(self.threads, 'CPU')}"
            raise TuningError(f"no node of the Ray cluster can evaluate plans: {why}")

    def _join(self) -> bool:
        """Connect to the cluster; whether that was done here, and not before."""
        import ray

        if ray.is_initialized():
            return False
        for name, value in WATCHFUL.items():
            os.environ.setdefault(name, value)
        address = self.workers.options.get("address", _ANY_CLUSTER)
        quiet = {"log_to_driver": False, "configure_logging": False}
        if address == _OWN_CLUSTER:
            quiet["include_dashboard"] = False
        try:
            ray.init(address=address, **quiet)
        except Exception as error:
            # Ray raises ConnectionError, RuntimeError, ValueError and its own.
            raise _no_cluster(address, error) from error
        return True

    def _found_places(self) -> list[tuple[str, int]]:
        """Node and number of a slot, of all nodes that are alike; a slot of each node first."""
        import ray

        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        room = {
            name: int(node["Resources"].get("CPU", 0)) // self.threads
            for name, node in alive.items()
        }
        self._introduce([name for name in alive if room[name] and name not in self._nodes])
        places = [
            (name, slot) for name in alive if self._nodes.get(name) for slot in range(room[name])
        ]
        places.sort(key=lambda place: place[1])
        return places[: self.workers.count]

    def _introduce(self, nodes: list[str]) -> None:
        """Have nodes say what they are, and warn of those that are not like this machine."""
        import ray

        asked = {
            self._task(_introduce, node, cpus=0).remote(self.work.kind): node for node in nodes
        }
        done = []
        if asked:
            done, _ = ray.wait(list(asked), num_returns=len(asked), timeout=_INTRODUCTION)
        for reference, node in asked.items():
            self._nodes[node] = ""
            short = node[:8]
            try:
                if reference not in done:
                    raise TimeoutError(f"no answer within {_INTRODUCTION:g} s")
                host, traits = ray.get(reference)
            except Exception as error:
                # A node that lacks a package raises whatever its import raises.
                logger.debug("a node did not introduce itself", exc_info=True)
                words = next(iter(str(getattr(error, "cause", error)).splitlines()), "no reason")
                self._refuse(f"node {short} of the Ray cluster gets no work: {words}")
                continue
            differences = self._traits.differences(traits)
            if differences:
                words = "; ".join(differences)
                self._refuse(f"node {short} ({host}) of the Ray cluster gets no work: {words}")
            else:
                self._nodes[node] = f"{host} {short}"

    def _refuse(self, words: str) -> None:
        self._refused.append(words)
        self.warn(words)

    def _task(self, function: Callable[..., Any], node: str, cpus: int) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        # Ray cannot tell a plan that kills its process from bad luck; `answer` can.
        return ray.remote(
            num_cpus=cpus,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )(function)

    def places(self) -> Iterable[tuple[str, int]]:
        """The slots of the nodes."""
        return self._places

    def start(self, place: tuple[str, int], plan: ResolvedPlan, seconds: float) -> Any:
        """Give a plan to a node."""
        task, key = self._task(_evaluate, place[0], self.threads), self._sent.hex()
        return task.remote(key, self.work.kind, self._sent, self.threads, plan, seconds)

    def wait(self, handles: Collection[Any]) -> Iterable[Any]:
        """Wait for one node at least."""
        import ray

        return list(ray.wait(list(handles), num_returns=1)[0])

    def answer(self, place: tuple[str, int], handle: Any, ticket: Ticket) -> Answer | None:
        """What a node answered; a plan whose node is lost is to be run again, three times."""
        import ray

        node = place[0]
        try:
            answer: Answer = ray.get(handle)
        except ray.exceptions.RayTaskError as error:
            return Raised(getattr(error, "cause", None) or error)
        except ray.exceptions.RayError as error:
            logger.debug("a task was lost", exc_info=True)
            process_died = isinstance(
                error, ray.exceptions.WorkerCrashedError | ray.exceptions.OutOfMemoryError
            )
            if process_died and self._lives(node):
                return died(self._nodes[node])
            return self._lost(node, ticket)
        if isinstance(answer, Assessment):
            return replace(answer, node=self._nodes[node])
        return answer

    def _lives(self, node: str) -> bool:
        import ray

        try:
            ray.get(self._task(_show_life, node, cpus=0).remote(), timeout=_SIGN_OF_LIFE)
        except ray.exceptions.RayError:
            return False
        return True

    def _lost(self, node: str, ticket: Ticket) -> Answer | None:
        """A plan whose node is gone: to be run again, unless that was too often."""
        ticket.losses += 1
        name = self._nodes[node]
        if any(node == found for found, _ in self._places):
            self.warn(f"node {name} of the Ray cluster was lost; its plans run again elsewhere")
        self._places = [place for place in self._found_places() if place[0] != node]
        return died(name) if ticket.losses > _RUNS_AGAIN else None

    def close(self) -> None:
        """Give up what goes on; leave the cluster if it was joined here."""
        import ray

        for handle in self.busy:
            ray.cancel(handle, force=True)
        del self._sent
        if self._own:
            ray.shutdown()


def _no_cluster(address: str, error: Exception) -> ConfigurationError:
    words = next(iter(str(error).splitlines()), "no reason given")
    return ConfigurationError(
        f"workers: there is no Ray cluster at address {address!r} that this machine is a node of: "
        f"{type(error).__name__}: {words}; start one with `ray start --head`, or use the address "
        f"local"
    )
