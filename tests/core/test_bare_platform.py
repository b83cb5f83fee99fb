"""A system without the parts that only Linux has runs, or gives a reason."""

from __future__ import annotations

import os
import subprocess
import sys

import bare_platform
import numpy as np
import pytest

#: Tunes an ONNX model on two workers, as a script on Windows would, and calls the loaded result.
TUNING = """
import os, signal, sys
import numpy as np
from neural_mp import MixedPrecision, load
from neural_mp.core.hardware import detect
from neural_mp.errors import KernelLogError
from neural_mp.profiling import kernel_log

if __name__ == "__main__":
    missing = [name for name in ("killpg", "pread", "sched_getaffinity") if hasattr(os, name)]
    assert not missing and not hasattr(signal, "SIGPIPE"), missing
    assert detect().flags and detect().cores
    file, out = sys.argv[1:]
    inputs = [np.random.default_rng(i).random((1, 6)).astype("f4") for i in range(8)]
    converter = MixedPrecision(model=file)
    converter.calib_dataloader = inputs
    converter.eval_func = lambda model: 1.0
    converter.workers = 2
    converter.workspace = out + "_workspace"
    result = converter()
    result.save(out)
    np.testing.assert_array_equal(load(out)(inputs[0]), result(inputs[0]))
    try:
        with kernel_log():
            pass
    except KernelLogError as error:
        assert "Linux and macOS" in str(error), error
    else:
        raise AssertionError("kernels were logged")
"""


@pytest.mark.slow
def test_a_model_is_tuned_on_two_workers_without_linux(tmp_path):
    import onnx
    from onnx_nets import dense_net

    onnx.save(dense_net(10), tmp_path / "net.onnx")
    (tmp_path / "script.py").write_text(TUNING)
    run = subprocess.run(
        [sys.executable, "script.py", "net.onnx", "out"],
        cwd=tmp_path,
        env={**os.environ, bare_platform.VARIABLE: "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


HIDDEN = """
import bare_platform, importlib, os, pkgutil, sys
import neural_mp
for module in pkgutil.walk_packages(neural_mp.__path__, "neural_mp."):
    if "__main__" in module.name or module.name.endswith("_main"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name in bare_platform.MODULES:
            print(module.name, error.name)
"""


@pytest.mark.slow
def test_no_module_imports_what_only_posix_has():
    run = subprocess.run(
        [sys.executable, "-c", HIDDEN],
        env={**os.environ, bare_platform.VARIABLE: "1"},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, ""), run.stderr


def test_code_of_the_project_does_not_see_what_is_hidden():
    """The other tests of this file would pass without a word if nothing were hidden."""
    code = """
import bare_platform, pathlib
bare_platform.hide()
scope = {"__name__": "neural_mp.probe"}
for statement in ("import resource", "open('/proc/cpuinfo')", "import ctypes; ctypes.CDLL(None)",
                  "import pathlib; pathlib.Path('/proc/cpuinfo').read_text()"):
    try:
        exec(statement, scope)
    except (ImportError, OSError, TypeError):
        continue
    raise SystemExit(statement)
pathlib.Path("/proc/cpuinfo").read_text()
import resource
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_peak_of_memory_covers_an_array():
    from neural_mp.util.system.memory import read_peak_bytes

    assert np.ones(25 << 20, np.uint8).nbytes < read_peak_bytes() < 1 << 40
