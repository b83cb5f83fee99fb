"""Training on two devices: what is not finite on either changes no weight, and is seen."""

import subprocess
import sys
from pathlib import Path

import pytest
from two_devices import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done():
    """All cases in one process: to import TensorFlow takes longer than the cases."""
    script = Path(__file__).with_name("two_devices.py")
    return subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("case", [case.__name__ for case in CASES])
def test_on_two_devices(done, case):
    """Stock Keras asks the first device alone."""
    assert case in done.stdout.split(), done.stderr[-2000:]
