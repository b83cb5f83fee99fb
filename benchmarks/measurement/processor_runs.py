"""What `processors.py` measures in a child process: a vision model in INT8, or a whole search."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measurement.search_data import Accuracy, Digits
from benchmarks.nets import gated, vision_nets
from neural_mp import MixedPrecision, common
from neural_mp.adaptors.loaded_model import AnyModel, LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.hardware import PORTABLE, detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.profiling import Ratio, estimate_latency_ratio, time_interleaved_rounds
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement.sqnr import output_sqnr_db

CALIBRATION, UNSEEN, STEP = 16, 8, 4
#: What models are converted for, one beside the other; `vnni` leaves weights their full range.
NATIVE, FULL_RANGE = "this", "vnni"
_CONF = "evaluation: {performance: {cores_per_instance: 1}}\n"


def quiet() -> None:
    """Hide what frameworks say of packages that are not here, and of themselves."""
    for name in ("torch.onnx", "neural_mp.adaptors.tensorflow"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def words_of(speedup: Ratio) -> dict[str, float]:
    return {"value": speedup.value, "low": speedup.low, "high": speedup.high}


def timed(models: list[AnyModel], batch: np.ndarray, **options: Any) -> list[list[float]]:
    runs: list[Callable[[], Any]] = [partial(model, batch) for model in models]
    return time_interleaved_rounds(runs, **options)


def speed_beside(reference: list[float], seconds: list[float]) -> dict[str, float]:
    """How many times as fast as a reference something is, measured apart from any search."""
    speedup = estimate_latency_ratio(seconds, reference).inverse
    return {"value": speedup.value, "low": speedup.low, "high": speedup.high}


def vision(framework: str, name: str, sizes: list[int], rounds: int) -> dict[str, Any]:
    """A model in FP32, in INT8 for this machine, for all, and with weights of the full range."""
    source = vision_nets.BUILD[framework](name)
    inputs = partial(vision_nets.inputs_for, framework)
    calibration = np.split(inputs(CALIBRATION, seed=1), CALIBRATION // STEP)
    unseen = np.split(inputs(UNSEEN, seed=2), UNSEEN // STEP)
    adaptor = adaptor_for(source)
    with adaptor.threads(1):
        model = LoadedModel(adaptor, adaptor.load(source, example=calibration[0]))
        forms: dict[str, AnyModel] = {}
        for target in (NATIVE, PORTABLE, FULL_RANGE):
            space = adaptor.space(model.held, detect().for_target(target))
            space = space.restricted_to([Precision.INT8])
            if not forms:
                observed = adaptor.observe(model.held, calibration, space)
            tunable = model.in_space(space).with_observations(observed)
            forms[target] = tunable.convert_by_plan(space.resolve(space.fastest_plan()))
        decibels = {t: output_sqnr_db(model, form, unseen) for t, form in forms.items()}
        speeds = {}
        for size in sizes:
            batch = inputs(size, seed=3)
            compared = [model, forms[NATIVE], forms[PORTABLE]]
            timings = timed(compared, batch, warmup=2, iterations=rounds, time_limit=25)
            float_, native, portable = timings
            speeds[size] = {
                "int8": words_of(estimate_latency_ratio(native, float_).inverse),
                "portable": words_of(estimate_latency_ratio(portable, native).inverse),
            }
    return {
        "products": {str(k): str(p) for k, p in adaptor.int8_accumulation(detect()).items()},
        "decibels": decibels,
        "sizes": {target: form.size for target, form in forms.items()},
        "float_size": model.size,
        "speeds": speeds,
    }


def search(framework: str, size: int, repeats: int, rounds: int) -> list[dict[str, Any]]:
    """Whole searches on the net that INT8 makes slower, each measured once more afterwards."""
    source = gated.BUILD[framework]()
    batch = Digits("test", framework == "tensorflow").images[:size]
    adaptor = adaptor_for(source)
    with adaptor.threads(1):
        model = LoadedModel(adaptor, adaptor.load(source, example=batch))
        lowest = _lowest(model, framework)
        return [_searched(source, framework, model, lowest, batch, rounds) for _ in range(repeats)]


def _lowest(model: AnyModel, framework: str) -> AnyModel:
    """All that can be in INT8 in INT8, whether that is faster or not."""
    space = model.adaptor.space(model.held, detect()).restricted_to([Precision.INT8])
    some = Digits("train", framework == "tensorflow").images[:100]
    calibrated = model.in_space(space).with_calibration([some])
    return calibrated.convert_by_plan(space.resolve(space.fastest_plan()))


def _searched(
    source: Any,
    framework: str,
    model: AnyModel,
    lowest: AnyModel,
    batch: np.ndarray,
    rounds: int,
) -> dict[str, Any]:
    result = _result(source, framework, len(batch))
    report = result.report
    with result.adaptor.threads(1):
        compared = [model, lowest, result.loaded]
        timings = timed(compared, batch, warmup=10, iterations=rounds, time_limit=8)
        float_, low, tuned = timings
    return {
        "met": result.met,
        "counts": counted(result.plan),
        "effective": sum(by.get("int8", 0) for by in report.op_counts.values()),
        "said": report.speedup,
        "said_low": report.speedup_low,
        "said_high": report.speedup_high,
        "measured": speed_beside(float_, tuned),
        "lowest": speed_beside(float_, low),
        "baseline": report.baseline_accuracy,
        "accuracy": report.accuracy,
        "trials": [(counted(t.plan), t.outcome.value, t.speedup) for t in result.trials],
        "seconds": sum(report.seconds.values()),
    }


def _result(source: Any, framework: str, size: int) -> OptimizedModel:
    def loader(split: str) -> common.DataLoader:
        return common.DataLoader(Digits(split, framework == "tensorflow"), batch_size=size)

    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder) / "conf.yaml"
        conf.write_text(_CONF, encoding="utf-8")
        converter = MixedPrecision(conf)
        converter.model = source
        converter.precisions = "int8"
        converter.metric = Accuracy()
        converter.eval_dataloader = loader("test")
        converter.calib_dataloader = loader("train")
        converter.workspace = Path(folder) / "workspace"
        converter.listener = Listener()
        return converter()


def counted(plan: PrecisionPlan) -> dict[str, int]:
    """Precision → how many ops a plan has in it."""
    counts: dict[str, int] = {}
    for config in plan.values():
        counts[config.precision.value] = counts.get(config.precision.value, 0) + 1
    return counts
