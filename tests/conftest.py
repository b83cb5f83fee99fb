"""Real small models on real data, trained once a test session."""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sqlite3
import sys
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

# One thread, here and in child processes: on a busy machine, threads that wait for each other at
# every op make tiny nets a hundred times slower. Set before torch is imported.
os.environ["OMP_NUM_THREADS"] = "1"
# Without bytecode files, each of some hundred child processes compiles all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Child processes import `sitecustomize`, which spares them collections of garbage.
_CHILDREN = Path(__file__).parent / "child_processes"
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(_CHILDREN), os.environ.get("PYTHONPATH")])
)
# torch's cache of fake tensors costs more than it saves for nets of few layers.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
# Where oneDNN is to do as on an older processor, TensorFlow is to do so, too: on those without
# AVX-512 it leaves oneDNN's float kernels off by itself. Set before TensorFlow is imported.
if os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper() in ("SSE41", "AVX", "AVX2", "AVX2_VNNI"):
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

# What takes seconds to import is imported by fixtures: the process that hands out the tests to
# others runs none of them.
import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from filelock import FileLock
from hypothesis import settings
from made_once import make_once
from ray_nodes_here import HEAD, NODE

sys.path.append(str(_CHILDREN))
import bare_platform

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from neural_mp.core.hardware import Hardware
    from neural_mp.testing import Accuracy, Split

if os.environ.get(bare_platform.VARIABLE):
    bare_platform.hide()

# The same examples on every run of CI: a red one means that the change broke it.
settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile("dev", deadline=None)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


# Each of the many graphs that torch captures makes Python look through all that is there, again and
# again: a fifth of the time of such tests. What is in cycles is still found, less often. A process
# takes up to 160 MB more than with 50,000. A collection of all objects would come once, near the
# end, and take a quarter of a minute in each process.
gc.set_threshold(400_000, 10, 100_000)


@pytest.fixture(scope="session", autouse=True)
def _leave_writing_to_the_system():
    """Commits of SQLite do not wait for the disk: no test is about a power failure."""
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "connect")
    def set_up(connection, _) -> None:
        if isinstance(connection, sqlite3.Connection):
            with suppress(sqlite3.Error):  # a damaged file, as a test has made it
                connection.execute("PRAGMA synchronous = OFF")


@pytest.fixture(scope="session", autouse=True)
def _what_is_alike_is_made_once(tmp_path_factory):
    """Statements, databases, commands and schemas."""
    with pytest.MonkeyPatch.context() as patch:
        make_once(patch, tmp_path_factory.mktemp("once"))
        yield


@pytest.fixture(scope="session", autouse=True)
def _functions_of_the_exporter_are_read_once():
    """For every export to ONNX, hundreds of functions are parsed and registered again."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    export = torch.onnx.export

    def exported(*arguments, **options):
        try:
            from onnxscript._internal.values import TracedOnnxFunction
        except ImportError:  # before onnxscript 0.6
            from onnxscript.values import TracedOnnxFunction
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        getter = TracedOnnxFunction.function_ir.fget
        if not hasattr(getter, "cache_info"):
            patch.setattr(TracedOnnxFunction, "function_ir", property(cache(getter)))
            filled = cache(ONNXRegistry.from_torchlib)

            def registry(opset_version):
                copied = copy(filled(opset_version))
                copied.functions = {op: [*overloads] for op, overloads in copied.functions.items()}
                return copied

            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(registry))
        return export(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, "export", exported)
        yield


@pytest.fixture(scope="session", autouse=True)
def _imported_ops_that_are_on_no_device_stay_there():
    """For every op of a graph that TensorFlow imports, it looks in three contexts for a device."""
    if "tensorflow" not in sys.modules:
        yield
        return
    from tensorflow.python.framework import importer

    load, process = importer._import_graph_def_internal, importer._ProcessNewOps
    is_placed = False

    def loaded(graph_def, *arguments, **options):
        nonlocal is_placed
        nodes = getattr(graph_def, "node", ())
        is_placed = any(node.device or "_class" in node.attr for node in nodes)
        return load(graph_def, *arguments, **options)

    def placed(graph):
        if is_placed or graph._device_functions_outer_to_inner:
            process(graph)
        else:
            graph._add_new_tf_operations(compute_devices=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importer, "_import_graph_def_internal", loaded)
        patch.setattr(importer, "_ProcessNewOps", placed)
        yield


def pytest_configure(config):
    """Share out files by a scheduler that survives crashes, where pytest-xdist is installed."""
    if config.pluginmanager.hasplugin("xdist"):
        config.pluginmanager.import_plugin("file_scheduler")


def pytest_runtest_setup(item):
    """Tests in full take hours: the time limit of a test does not hold for them."""
    if item.get_closest_marker("full"):
        faulthandler.cancel_dump_traceback_later()


#: Files of 18 seconds and more, which come first: at the end, one would run while others idle.
LONGEST = frozenset(
    {
        "zoo/test_torch_zoo.py",
        "zoo/test_keras_layers.py",
        "test_docs.py",
        "security/test_attacks.py",
        "security/test_mutated_files.py",
        "security/test_accepted_files.py",
        "test_other_processors.py",
        "test_examples.py",
        "test_examples_digits.py",
        "api/test_tune_many_on_ray.py",
        "api/test_runtime_results.py",
        "api/test_surroundings.py",
        "test_installation.py",
        "tuning/test_ray.py",
        "tuning/test_workers.py",
        "compat/test_inc_example_scripts.py",
        "adaptors/common/test_runtime_corrections.py",
        "adaptors/pytorch/test_pytorch_architectures.py",
        "adaptors/pytorch/test_pytorch_ways_out.py",
    }
)


def pytest_collection_modifyitems(config, items):
    """Tests in full run by `-m full` alone; of the others, the longest files come first.

    Those without a slow test come last, to fill up all processes.
    """
    if "full" not in config.option.markexpr:
        full = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=full)
    _leave_messages_of_torch_to_one_logger()
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    longest = {Path(__file__).parent / name for name in LONGEST}
    items.sort(key=lambda item: (item.path not in longest, item.path not in slow))


def pytest_collection_finish():
    """Leave what was imported out of later searches through all objects.

    Garbage is collected among them, and sessions of TensorFlow are looked for.
    """
    gc.freeze()


def _leave_messages_of_torch_to_one_logger():
    """Messages of all loggers of torch are shown by the handler of the logger `torch`.

    pytest adds its handlers to each logger that does not propagate, six times a test, and some
    fifty of torch's do not. For any handler of its trace, torch also collects a stack with every
    record: 4 % of the time of an export.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish():
    """Take all that is there out of the collections in the end, twice by pytest and by Python.

    They would look through the millions of objects of three frameworks for errors in finalizers.
    """
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _nominal_times():
    """Models have nominal times, in fixtures too: no test is about how fast something is."""
    from quick_runs import give_nominal_times

    with pytest.MonkeyPatch.context() as patch:
        give_nominal_times(patch)
        yield


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    """Workspaces and outputs of a test stay in its own folder; nothing is forced on."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FORCE_BF16", raising=False)
    monkeypatch.delenv("FORCE_FP16", raising=False)


@pytest.fixture(scope="session")
def digits() -> tuple[Split, Split]:
    """Training and test split."""
    from neural_mp.testing import digits as load_digits

    return load_digits()


@pytest.fixture
def quick_runs(monkeypatch):
    """Capturing a net is not what the tests that ask for this are about."""
    from quick_runs import make_quick

    make_quick(monkeypatch)


@pytest.fixture(scope="session")
def write_once(request, tmp_path_factory) -> Callable[[str, Callable[[Path], None]], Path]:
    """Function: the file of a name, which the first of several processes of pytest-xdist writes."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if hasattr(request.config, "workerinput") else folder

    def write_for_all(name: str, write: Callable[[Path], None]) -> Path:
        file = folder / name
        with FileLock(folder / f"{name}.lock"):
            if not file.exists():
                write(file)
        return file

    return write_for_all


@pytest.fixture(scope="session", autouse=True)
def _nets_are_exported_once(write_once):
    """torch's exporter takes seconds for a net, in every process again."""
    if "onnx_nets" in sys.modules:
        sys.modules["onnx_nets"].write_once = write_once


@pytest.fixture(scope="session")
def _trained(digits, write_once):
    """Two nets."""
    import torch
    from nets import deep_net, small_net, train

    torch.manual_seed(0)
    small, deep = small_net(), deep_net()

    def train_both(file: Path) -> None:
        train(small, digits[0], epochs=6)
        train(deep, digits[0], epochs=10)
        torch.save([small.state_dict(), deep.state_dict()], file)

    file = write_once("trained.pt", train_both)
    for net, state in zip((small, deep), torch.load(file), strict=True):
        net.load_state_dict(state)
    return small, deep


@pytest.fixture(scope="session")
def net(_trained) -> nn.Module:
    """A small trained residual net with batch norms."""
    return _trained[0]


@pytest.fixture(scope="session")
def deep(_trained) -> nn.Module:
    """A trained net of 8 convolutions and 1 dense layer."""
    return _trained[1]


@pytest.fixture(scope="session")
def hostile_net(_trained) -> nn.Module:
    """The same function, with one channel ×1024 between convolutions 2 and 3."""
    from nets import hostile

    return hostile(_trained[1])


@pytest.fixture
def accuracy() -> Accuracy:
    from neural_mp.testing import Accuracy

    return Accuracy()


@pytest.fixture(scope="session")
def plain_machine() -> Hardware:
    """This machine without its 16-bit instructions."""
    from machine import machine

    return machine()


@pytest.fixture(scope="session")
def bf16_machine() -> Hardware:
    """A machine on which BF16 is forced."""
    from machine import machine

    from neural_mp.core.precision import Precision

    return machine(Precision.BF16)


@pytest.fixture(scope="session")
def all_machine() -> Hardware:
    """A machine on which everything is forced."""
    from machine import machine

    from neural_mp.core.precision import Precision

    return machine(Precision.BF16, Precision.FP16)


@pytest.fixture(scope="module")
def ray(pytestconfig):
    """Ray; the test is skipped where it is not installed."""
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # What Ray starts would give way to the other tests, and answer too late.
    os.environ["RAY_worker_niceness"] = "0"  # noqa: SIM112 (so Ray has it)
    # A node that is gone does not answer at once; a busy one has the usual time.
    os.environ["RAY_health_check_period_ms"] = "300"  # noqa: SIM112
    os.environ["RAY_health_check_failure_threshold"] = "3"  # noqa: SIM112
    yield pytest.importorskip("ray")
    # Ray replaces the handlers of crashes, so that one in a later test would print nothing.
    faulthandler.disable()
    faulthandler.enable(pytestconfig.stash[fault_handler_stderr_fd_key])


@pytest.fixture(scope="module")
def cluster(ray):
    """Two nodes of one CPU each."""
    from ray.cluster_utils import Cluster

    ray_cluster = Cluster(initialize_head=True, head_node_args={**NODE, **HEAD})
    ray_cluster.add_node(**NODE)
    yield ray_cluster
    ray.shutdown()
    ray_cluster.shutdown()


@pytest.fixture
def heeds_ctrl_c():
    """As in a terminal: what a shell starts in the background ignores the signal."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)
