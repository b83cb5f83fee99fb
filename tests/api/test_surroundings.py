"""After a run all is as it was before: the model, the frameworks' settings, the process."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from surroundings import differences, snapshot
from torch import nn

#: What is another thing afterwards, and why that is right: framework → what was done → names.
#: loky and Python each keep a process that looks after semaphores, with a pipe to it, once workers
#: were there; torch drops a handler of its trace where that is not asked for, at its first capture.
RIGHTLY = {
    "side_by_side": {"open files": r"new: \['pipe'(, 'pipe')?\], gone: \[\]"},
    "succeed": {
        "logger torch.__trace": r"LazyTraceHandler.* became \(10, False, False, \(\), \(\)\)"
    },
}


def after_each(framework: str, folder: Path) -> dict[str, dict[str, str]]:
    """What was done → what is different, in a process of its own."""
    directory = Path(__file__).resolve().parent
    own = map(str, (directory.parents[1], directory.parent, directory))
    paths = os.pathsep.join((*own, os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, str(directory / "surroundings_run.py"), framework, str(folder)],
        # Of the two threads of a net, one would wait for the other by computing.
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
        },
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow", "onnx file"])
def test_nothing_is_another_thing_after_a_run(framework, tmp_path):
    changes = after_each(framework, tmp_path)
    assert len(changes) == (14 if framework == "onnx file" else 13)
    unexpected = {
        done: {
            name: change
            for name, change in changed.items()
            if not re.search(RIGHTLY.get(done, {}).get(name, "^$"), change)
        }
        for done, changed in changes.items()
    }
    assert not {done: changed for done, changed in unexpected.items() if changed}


class Nothing(logging.Handler):
    def emit(self, record):
        pass


def _train(net):
    net.train()


def _freeze(net):
    net[0].bias.requires_grad_(False)


def _hook(net):
    net[0].register_forward_pre_hook(lambda *_: None)


def _weight(net):
    with torch.no_grad():
        net[0].weight[0, 0] += 1


def _gradient(net):
    net(torch.ones(1, 3)).sum().backward()


def _wrap(net):
    net[0].forward = lambda x: x


CHANGES = {
    "module": _train,
    "model: 0.bias": _freeze,
    "model: module 0": _hook,
    "model: 0.weight": _weight,
    "model: 0.bias ": _gradient,
    "model: module 0 ": _wrap,
    "torch: threads": lambda net: torch.set_num_threads(torch.get_num_threads() + 1),
    "torch: random": lambda net: torch.rand(1),
    "torch: matmul": lambda net: torch.set_float32_matmul_precision("medium"),
    "torch: default dtype": lambda net: torch.set_default_dtype(torch.float64),
    "torch: gradients": lambda net: torch.set_grad_enabled(False),
    "random": lambda net: random.random(),
    "numpy.random": lambda net: np.random.rand(),
    "numpy errors": lambda net: np.seterr(all="raise"),
    "environment": lambda net: os.environ.update(LEFT_BEHIND="1"),
    "warning filters": lambda net: warnings.filterwarnings("ignore", "left behind"),
    "logger root": lambda net: logging.getLogger().addHandler(Nothing()),
    "sys.path": lambda net: sys.path.append("left behind"),
    "folder": lambda net: os.chdir("/"),
    "umask": lambda net: os.umask(0o077),
    "open files": lambda net: setattr(net, "kept", open("left behind", "w")),  # noqa: PTH123, SIM115
}


@pytest.fixture(scope="module")
def few_frozen():
    """The objects that collections leave out are few: counting them takes as long as there are.

    What other tests have left closes its files.
    """
    gc.unfreeze()
    gc.collect()
    yield
    gc.freeze()


@pytest.fixture
def undone(monkeypatch, tmp_path, few_frozen):
    """All that the changes change is as before at the end of a test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # nobody else writes there
    states = torch.get_num_threads(), torch.get_float32_matmul_precision(), np.geterr()
    environment, paths, mask, folder = dict(os.environ), list(sys.path), os.umask(0), Path.cwd()
    os.umask(mask)
    handlers = list(logging.getLogger().handlers)
    with warnings.catch_warnings():
        yield
    torch.set_num_threads(states[0])
    torch.set_float32_matmul_precision(states[1])
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    np.seterr(**states[2])
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = paths
    os.umask(mask)
    os.chdir(folder)
    logging.getLogger().handlers[:] = handlers


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_left_behind_is_seen(name, undone):
    net = nn.Sequential(nn.Linear(3, 3))
    net.eval()
    previous = snapshot(model=net)
    assert not differences(previous, snapshot(model=net))
    CHANGES[name](net)
    assert any(
        name.strip() in difference for difference in differences(previous, snapshot(model=net))
    )
