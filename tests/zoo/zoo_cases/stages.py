"""Conversion of one case, and the second look at the saved result in a fresh process."""

from __future__ import annotations

import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from zoo_cases.case import NotBuiltError, ZooCase
from zoo_cases.comparison import EQUAL_DB, difference, leaves, mean_noise, noise, structure
from zoo_cases.sources import build_case

#: Batches for calibration and comparison.
BATCHES = 3
SAVED, INPUTS, OUTPUTS = "saved", "inputs.pickle", "outputs.npz"


def peak_memory() -> float:
    """Return the most bytes that this process held; `ru_maxrss` begins with its parent's."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) * 1024.0


def convert(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Build, convert, compare and save a case.

    Returns:
        the row of the results.
    """
    row: dict[str, Any] = {}
    try:
        begun = time.process_time()
        case = build_case(job["source"], job["name"], job["seed"], BATCHES, folder)
        row |= {"built": case.way or "as is", "build_seconds": _seconds_since(begun)}
        if job["full"]:
            row["memory_before"] = peak_memory()
    except NotBuiltError as error:
        return {"not_built": str(error)}
    return row | _converted(case, folder, job["full"])


def _converted(case: ZooCase, folder: Path, full: bool) -> dict[str, Any]:
    from neural_mp.errors import NeuralMPError

    begun = time.process_time()
    try:
        expected = [_run_seeded(case.run, batch) for batch in case.batches]
        result, settings = _tuned_somehow(case, folder, full)
        row = {"convert_seconds": _seconds_since(begun), "memory": peak_memory(), **settings}
        row |= _compared(case, expected, result)
        begun = time.process_time()
        result.save(folder / SAVED)
        row["save_seconds"] = _seconds_since(begun)
    except NeuralMPError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except Exception:  # noqa: BLE001 - an error of any other type is what is looked for
        return {"crashed": traceback.format_exc()[-3000:]}
    outputs = [array for batch in case.batches for _, array in leaves(_run_seeded(result, batch))]
    np.savez(folder / OUTPUTS, *outputs)
    (folder / INPUTS).write_bytes(pickle.dumps(case.batches))
    return row


def _tuned_somehow(case: ZooCase, folder: Path, full: bool) -> tuple[Any, dict[str, Any]]:
    """Return the result; where its error offers so, of modules that are converted one by one."""
    from neural_mp.errors import CaptureError

    try:
        return _tuned(case, folder, full), {}
    except CaptureError as error:
        if "capture = 'modules'" not in str(error):
            raise
        options = {**case.options, "capture": "modules"}
        return _tuned(replace(case, options=options), folder, full), {"by_modules": str(error)}


def _tuned(case: ZooCase, folder: Path, full: bool) -> Any:
    from neural_mp import MixedPrecision

    options: dict[str, Any] = {"precisions": "int8", "objective": "modelsize", "cache": False}
    if full:
        options = {"precisions": "int8,bf16", "runtime": "auto"}
    converter = MixedPrecision(
        model=case.model,
        calib_dataloader=[(batch, None) for batch in case.batches],
        workspace=folder / "workspace",
        **{**options, **case.options},
    )
    with warnings.catch_warnings(), _timed(full):
        warnings.simplefilter("ignore")
        return converter()


@contextmanager
def _timed(full: bool) -> Iterator[None]:
    """Measure latencies, and compare runtimes, only in a full run.

    Both take more time than all the rest, and OpenVINO waits forever in a child of a process that
    has compiled a model.
    """
    if full:
        yield
        return
    from neural_mp.tuning import recording
    from neural_mp.tuning.listener import Listener
    from neural_mp.tuning.measurement.objectives import Measurement

    def rounds(_: object, models: Any, **__: object) -> list[list[float]]:
        return [[1e-3] * 3] * len(models)

    with (
        mock.patch.object(recording, "_profile_ops", return_value={}),
        mock.patch.object(Measurement, "measure_rounds", rounds),
        mock.patch.object(Listener, "wants_hints", False),
    ):
        yield


def _compared(case: ZooCase, expected: list[Any], result: Any) -> dict[str, Any]:
    """Return noise, structure, precisions and warnings of a result."""
    noises: dict[str, list[float]] = {}
    unlike = ""
    for batch, reference in zip(case.batches, expected, strict=True):
        outputs = _run_seeded(result, batch)
        unlike = unlike or difference(structure(reference), structure(outputs))
        pairs = list(zip(leaves(reference), leaves(outputs), strict=False))
        for (path, ours), (_, theirs) in pairs:
            noises.setdefault(path, []).append(noise(ours, theirs))
    worst = {path: mean_noise(levels) for path, levels in noises.items()}
    lowest = min(worst, key=lambda path: worst[path], default="")
    return {
        "precisions": dict(Counter(str(config.precision) for config in result.plan.values())),
        "runtime": result.framework,
        "sqnr_db": _stored(worst[lowest]) if worst else None,
        "lowest": lowest,
        "outputs": len(worst),
        "unlike": unlike,
        "speedup": result.report.speedup,
        "warnings": [str(warning) for warning in result.report.warnings],
    }


def _stored(decibels: float) -> float:
    """Return a number that JSON can hold: outputs of another shape are as far as can be."""
    return round(max(decibels, -EQUAL_DB), 1)


def reload(job: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Load the saved result in this process, which has not built the model."""
    import neural_mp

    try:
        loaded = neural_mp.load(folder / SAVED)
        batches = pickle.loads((folder / INPUTS).read_bytes())
        outputs = [array for batch in batches for _, array in leaves(_run_seeded(loaded, batch))]
    except Exception:  # noqa: BLE001 - an error of any type is a finding
        return {"reload": traceback.format_exc()[-1500:]}
    expected = list(np.load(folder / OUTPUTS, allow_pickle=True).values())  # texts are objects
    if len(outputs) != len(expected):
        return {"reload": f"{len(outputs)} outputs, not {len(expected)}"}
    pairs = zip(expected, outputs, strict=True)
    least = min((noise(mine, theirs) for mine, theirs in pairs), default=np.inf)
    return {"reload": "equal" if least >= LEAST_RELOADED_DB else f"{least:.1f} dB"}


def _run_seeded(run: Callable[[Any], Any], batch: Any) -> Any:
    """Run a batch; models that draw masks or noise draw the same in each run."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
    return run(batch)


#: SQNR of a reloaded model: FP32 results fold batch norms when saved.
LEAST_RELOADED_DB = 110.0


def warm_up(case: ZooCase) -> None:
    """Convert, save and load a case, so that children of this process import nothing."""
    with tempfile.TemporaryDirectory() as folder:
        _converted(case, Path(folder), full=False)
        reload({}, Path(folder))


def _seconds_since(begun: float) -> float:
    return round(time.process_time() - begun, 2)


STAGES = {"convert": convert, "reload": reload}
