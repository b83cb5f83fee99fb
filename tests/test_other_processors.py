"""PyTorch and TensorFlow on processors that this one can stand for.

`ONEDNN_MAX_CPU_ISA` makes oneDNN leave newer instructions unused, so that a machine with VNNI does
as one without. It is read once, when a process starts: so these tests run in another process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PRODUCTS = ("pytorch/test_pytorch_products.py", "tf/test_tensorflow_products.py")
KERNELS = (
    "pytorch/test_pytorch_kernels.py",
    "pytorch/test_pytorch_fused.py",
    "tf/test_tensorflow_kernels.py",
)
#: Left out: what computes in float, and what `PRODUCTS` asks of products without calibration.
LEFT_OUT = ("embeddings", "tied", "conversions", "weights_alone", "dynamic_ranges")


@pytest.mark.parametrize(
    ("limit", "files"), [("AVX2", (*PRODUCTS, *KERNELS)), ("AVX512_CORE", PRODUCTS)]
)
def test_integer_kernels_are_right_on_older_processors(limit, files):
    if os.environ.get("ONEDNN_MAX_CPU_ISA") == limit:
        pytest.skip("these tests are run under this limit already")
    chosen = " and ".join(f"not {expression}" for expression in LEFT_OUT)
    paths = [str(ROOT / "tests/adaptors" / name) for name in files]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-k", chosen, *paths],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": limit},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "passed" in done.stdout
