"""Read ordinary files that the frameworks made themselves, and count which are refused.

    python benchmarks/accepted_files.py                     # all files
    python benchmarks/accepted_files.py --only savedmodel --every 4

A file counts if the framework itself reads and runs it. Outputs are compared with those of the
framework. The exit code is 1 if more files are refused than `LIMITS` permits, if any output is
wrong, if any error is not one of neural-mp, or if fewer files than `LEAST` count.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Beside this file lie `onnx.py` and `tensorflow.py`, which are not those.
sys.path[0] = str(Path(__file__).resolve().parent / "accepted")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import gc
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator

from cases import Case, Outcome, Result

#: Kind of file → the largest accepted fraction of refused files.
LIMITS = {"keras": 0.02, "savedmodel": 2 / 27, "exports": 0.0, "onnx": 0.0}
#: Kind of file → the least number of files that the framework itself runs.
LEAST = {"keras": 300, "savedmodel": 27, "exports": 51, "onnx": 300}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", choices=LIMITS, nargs="*", default=[], help="kinds of files")
    parser.add_argument("--every", type=int, default=1, help="read every N-th file only")
    parser.add_argument("--names", nargs="*", default=[], help="read files of these names only")
    return parser.parse_args()


def _results(kind: str, chosen: argparse.Namespace, folder: Path) -> Iterator[Result]:
    if kind == "keras":
        from keras_models import CASES, results
    elif kind == "exports":
        from exports import CASES, results
    elif kind == "onnx":
        from onnx_models import CASES, results
    else:
        from saved_models import CASES, results
    gc.freeze()  # Keras collects garbage for every file, and need not look through the frameworks
    cases: list[Case] = CASES.all[:: chosen.every]
    if chosen.names:
        cases = [case for case in cases if case.name in chosen.names]
    yield from results(cases, folder)


def _passes(kind: str, results: list[Result], least: int) -> bool:
    """Print the outcomes of a kind of file; return whether they are within the limits."""
    counts = Counter(result.outcome for result in results)
    counted = len(results) - counts[Outcome.NOT_RUN]
    print(
        f"{kind}: {counted} files, {counts[Outcome.TAKEN]} taken, {counts[Outcome.REFUSED]} "
        f"refused, {counts[Outcome.WRONG]} with wrong outputs, {counts[Outcome.TRACEBACK]} "
        f"tracebacks; {counts[Outcome.NOT_RUN]} more that the framework itself does not run"
    )
    failed = counts[Outcome.WRONG] + counts[Outcome.TRACEBACK]
    refused = counts[Outcome.REFUSED] > LIMITS[kind] * counted
    return not failed and not refused and counted >= least


def main() -> int:
    """Read the files, and print the counts; return the exit code."""
    chosen = _arguments()
    warnings.simplefilter("ignore")
    passed = []
    for kind in chosen.only or LIMITS:
        results = []
        with tempfile.TemporaryDirectory() as folder:
            for result in _results(kind, chosen, Path(folder)):
                results.append(result)
                if result.outcome is not Outcome.TAKEN:
                    name = result.case.name
                    print(f"  {result.outcome.value}: {name}: {result.reason[:400]}", flush=True)
        whole = chosen.every == 1 and not chosen.names
        passed.append(_passes(kind, results, LEAST[kind] if whole else 1))
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
