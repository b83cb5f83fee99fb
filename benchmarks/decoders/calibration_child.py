"""Print the result of one command of `calibration.py`."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))

from calibration import COMMANDS

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    print(json.dumps(COMMANDS[name](*words)))
