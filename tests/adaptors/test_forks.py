"""Children that were forked after their parent had used a runtime never wait for its threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("forked_program.py")


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks exist on POSIX only")
@pytest.mark.parametrize(
    ("framework", "outcomes"),
    [
        ("onnxrt", {"load": "done", "tune": "done", "call": "done"}),
        ("openvino", {"load": "ForkError", "tune": "ConfigurationError"}),
        ("pytorch", {"load": "ForkError", "tune": "ForkError", "one thread": "done"}),
        ("tensorflow", {"load": "ForkError", "tune": "ForkError", "call": "ForkError"}),
    ],
)
def test_a_forked_child_runs_or_gets_an_error(tmp_path, framework, outcomes):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, framework, tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    actual = json.loads(done.stdout.splitlines()[-1])
    assert outcomes.items() <= actual.items(), actual
    assert "blocked" not in actual.values()
