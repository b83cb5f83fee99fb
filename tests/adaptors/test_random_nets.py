"""Integer kernels compute what their simulation does, on random nets and drawn graphs."""

import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_torch import FAMILIES, checked

FOLDER = Path(__file__).parent
SEEDS = range(15000, 15015)
#: Program and arguments → random graphs that it checks, each a promise of its docstring.
PROGRAMS = (
    ("fuzz_torch.py", "--count", "500"),
    ("fuzz_graphs.py", "onnx", "--count", "1000"),
    ("fuzz_graphs.py", "tensorflow", "--count", "500"),
)


@pytest.mark.slow
def test_no_net_raises_or_computes_what_rounding_does_not_explain():
    families = list(FAMILIES)
    verdicts = [checked(families[seed % len(families)], seed) for seed in SEEDS]
    assert [verdict for verdict in verdicts if verdict.failure] == []
    assert any(verdict.int8 for verdict in verdicts)


@pytest.mark.full
@pytest.mark.parametrize("arguments", PROGRAMS, ids=" ".join)
def test_no_graph_of_many_is_wrong(arguments):
    program, *options = arguments
    command = [sys.executable, str(FOLDER / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
