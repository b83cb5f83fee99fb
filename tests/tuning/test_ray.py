"""Trials side by side on the nodes of a Ray cluster."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import threading
import time

import cloudpickle
import pytest
from onnx_nets import convolutions
from ray_nodes_here import added_raylet
from tuning_script import killed_and_resumed, write_inputs

from neural_mp import ExitPolicy, MixedPrecision
from neural_mp.errors import ConfigurationError, TuningError
from neural_mp.metrics import build_metric
from neural_mp.tuning import trial_runner
from neural_mp.tuning.evaluation import sharding
from neural_mp.tuning.executors import ray_cluster

pytestmark = pytest.mark.slow

# A node does not have this file.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def onnx_net(hostile_net):
    """The net for ONNX Runtime: a node's process imports PyTorch for seconds."""
    return convolutions(hostile_net)


@pytest.fixture(scope="module")
def joined(cluster, ray):
    """The cluster, to which this process stays connected: nodes keep their processes.

    Runs in a process of their own connect by themselves.
    """
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    return cluster


@pytest.fixture
def converter(onnx_net, digits):
    tuner = MixedPrecision()
    tuner.model = onnx_net
    tuner.precisions = "int8"
    tuner.strategy = "random"
    tuner.objective = "modelsize"
    tuner.metric = build_metric("accuracy")
    tuner.eval_dataloader = digits[1].loader()
    tuner.exit_policy = ExitPolicy(max_trials=8)
    return tuner


class MarkedMetric:
    """Accuracy that takes its time, and leaves a file named for the parent of its process."""

    def __init__(self, folder, pause):
        self.inner, self.folder, self.pause = build_metric("accuracy"), folder, pause

    def reset(self):
        self.inner.reset()

    def update(self, preds, labels):
        (self.folder / str(os.getppid())).touch()
        time.sleep(self.pause)
        self.inner.update(preds, labels)

    def result(self):
        return self.inner.result()


def kill_when_at_work(folder, raylet):
    """A node's processes are children of its raylet, and end with it."""
    until = time.monotonic() + 600
    while not (folder / str(raylet)).exists() and time.monotonic() < until:
        time.sleep(0.05)
    os.kill(raylet, signal.SIGKILL)


def tuned_as_a_node_is_killed(converter, cluster, folder):
    """The result of a run that has lost a node while it was at work."""
    converter.workers = {"engine": "ray", "address": cluster.address}
    raylet = added_raylet(cluster)
    killer = threading.Thread(target=kill_when_at_work, args=(folder, raylet))
    killer.start()
    result = converter()
    killer.join()
    assert (folder / str(raylet)).exists()
    assert any("was lost; its plans run again" in warning for warning in result.report.warnings)
    return result


def told(result):
    return [(trial.plan, trial.accuracy, trial.outcome) for trial in result.trials]


@pytest.mark.parametrize(
    ("strategy", "host_names"), [("exhaustive", False), ("random", True), ("tpe", False)]
)
def test_two_nodes_find_what_one_process_finds(converter, joined, strategy, host_names):
    converter.strategy = strategy
    single = converter()
    converter.workers = {"engine": "ray", "address": joined.address, "host_names": host_names}
    together = converter()
    assert told(together) == told(single)
    assert together.plan == single.plan
    nodes = {trial.node for trial in together.trials}
    assert {trial.node for trial in single.trials} == {""}
    assert all((platform.node() in node) == host_names for node in nodes)
    if strategy != "tpe":  # which waits for every trial
        assert len(nodes) == 2


def test_a_node_killed_in_the_middle_changes_nothing(converter, joined, tmp_path):
    converter.metric = MarkedMetric(tmp_path, 0.0)
    single = converter()
    converter.metric = MarkedMetric(tmp_path, 0.2)
    together = tuned_as_a_node_is_killed(converter, joined, tmp_path)
    assert told(together) == told(single)


def test_a_driver_that_is_killed_repeats_nothing_when_it_is_resumed(
    joined, onnx_net, digits, tmp_path
):
    write_inputs(tmp_path, onnx_net, digits[1])
    workers = f"ray:{joined.address}"
    resumed = killed_and_resumed(tmp_path, "exhaustive", workers, pause=0.5)
    assert resumed.outcome["plans"] == resumed.outcome["trials"]
    assert resumed.repeated == 0
    assert not resumed.left


class MergingMetric(MarkedMetric):
    def merge(self, other):
        self.inner.merge(other.inner)


def test_a_share_of_an_evaluation_whose_node_is_killed_runs_again(
    converter, joined, tmp_path, monkeypatch
):
    converter.strategy, converter.early_stopping = "basic", False
    converter.exit_policy = ExitPolicy(max_trials=1)
    converter.metric = MergingMetric(tmp_path, 0.0)
    single = converter()
    monkeypatch.setattr(trial_runner, "STARTING", 0.0)
    monkeypatch.setattr(sharding, "estimate_sharded_seconds", lambda *arguments: 0.0)
    converter.metric = MergingMetric(tmp_path, 0.5)
    together = tuned_as_a_node_is_killed(converter, joined, tmp_path)
    assert told(together) == told(single)
    assert len(together.trials[0].node.split(", ")) == 2


class DeadlyMetric(MarkedMetric):
    """A metric that ends every process but the first."""

    def __init__(self, folder, pause):
        super().__init__(folder, pause)
        self.driver = os.getpid()

    def reset(self):
        super().reset()
        if os.getpid() != self.driver:
            os._exit(3)


def test_a_process_that_dies_makes_its_plan_a_failed_one(converter, joined, tmp_path):
    converter.metric = DeadlyMetric(tmp_path, 0.0)
    converter.workers = {"engine": "ray", "address": joined.address}
    with pytest.raises(TuningError, match=r"different plans failed .* a worker process crashed"):
        converter()


def test_a_node_that_computes_in_another_way_gets_no_work(converter, joined, monkeypatch):
    original = ray_cluster.NumericalTraits.of_this_machine

    def other_version(kind):
        return ray_cluster.NumericalTraits({**original(kind).values, "onnxruntime": "1.0"})

    # Only this process is changed, not those of the nodes.
    monkeypatch.setattr(ray_cluster.NumericalTraits, "of_this_machine", other_version)
    converter.workers = {"engine": "ray", "address": joined.address}
    with pytest.raises(TuningError, match=r"node .* is excluded: onnxruntime is .*, here 1\.0"):
        converter()


def test_host_names_are_a_switch(converter, joined):
    converter.workers = {"engine": "ray", "address": joined.address, "host_names": "yes"}
    with pytest.raises(ConfigurationError, match="workers: host_names must be true or false"):
        converter()


def test_an_address_without_a_cluster_is_named(converter, ray):
    converter.workers = {"engine": "ray", "address": "127.0.0.1:9"}
    with pytest.raises(ConfigurationError, match=r"no Ray cluster at address '127\.0\.0\.1:9'"):
        converter()


def test_joining_a_cluster_leaves_the_handler_of_sigterm(cluster):
    """Ray's own handler would end a command without its result."""
    code = """
import signal, sys
from neural_mp.tuning.executors.contract import Workers
from neural_mp.tuning.executors.ray_cluster import ClusterNodes

signal.signal(signal.SIGTERM, lambda *arguments: None)
handler = signal.getsignal(signal.SIGTERM)
ClusterNodes(Workers("ray", options={"address": sys.argv[1]}), dict, print)
assert signal.getsignal(signal.SIGTERM) is handler
"""
    subprocess.run([sys.executable, "-c", code, cluster.address], check=True)
