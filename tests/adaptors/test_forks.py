"""Children that were forked after their parent had used a runtime never wait for its threads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "security" / "attacks" / "interrupted" / "forks.py"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks exist on POSIX only")
@pytest.mark.parametrize(
    ("framework", "outcomes"),
    [
        (
            "onnxrt",
            {"loads": "done", "tunes": "done", "calls": "done", "drops a model": "done"},
        ),
        (
            "openvino",
            {"loads": "ForkError", "tunes": "ConfigurationError", "drops a model": "done"},
        ),
        ("pytorch", {"loads": "ForkError", "tunes": "ForkError", "loads on one thread": "done"}),
        ("tensorflow", {"loads": "ForkError", "tunes": "ForkError", "calls": "ForkError"}),
    ],
)
def test_a_forked_child_runs_or_gets_an_error(tmp_path, framework, outcomes):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", PROGRAM, framework, tmp_path, *outcomes],
        env={**os.environ, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    actual = {}
    for line in done.stdout.splitlines():
        actual |= json.loads(line) if line.startswith("{") else {}
    assert actual == outcomes
