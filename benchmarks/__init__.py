"""Programs that measure: `python -m benchmarks.NAME`, from the folder of the repository."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Child processes run modules of this package in other folders and by other interpreters.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
)
