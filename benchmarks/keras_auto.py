"""Keras' EfficientNet-B0 and MobileNetV3-Small with `runtime=auto`, beside NNCF on OpenVINO.

    OMP_NUM_THREADS=1 python -m benchmarks.keras_auto --peer ENV/bin/python [--only NAME…]

Weights are drawn from a seed, by default the date, and the moments of batch norms are those of
the drawn images. NNCF starts from the model in OpenVINO; ours may lose as much as NNCF's file. All
ways run in turn in one process on one thread, in CPU seconds.
"""

from __future__ import annotations

import argparse
import datetime
import logging
import math
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import openvino
from rich.console import Console

from benchmarks.measurement.children import run_child
from benchmarks.measurement.runtime_stages import (
    F32,
    NNCF,
    NNCF_F32,
    OPENVINO,
    OURS,
    Call,
    compile_for_openvino,
    fidelity,
    repeat_call,
    run_in_turn,
)
from benchmarks.measurement.tables import make_table
from benchmarks.nets.runtime_nets import noise
from neural_mp import AccuracyCriterion, MixedPrecision
from neural_mp.profiling import estimate_latency_ratio
from neural_mp.tuning.measurement.objectives import Measurement

NETS: Mapping[str, Callable[..., keras.Model]] = {
    "EfficientNet-B0": keras.applications.EfficientNetB0,
    "MobileNetV3-Small": keras.applications.MobileNetV3Small,
}
#: Net, images of a call.
CASES = (("EfficientNet-B0", 1), ("EfficientNet-B0", 8), ("MobileNetV3-Small", 1))
#: Images for calibration and for the noise of outputs; ours may be 0.1 dB worse.
CALIBRATION, JUDGED, SLACK = 32, 32, 1.023


def draw_images(count: int, seed: int) -> np.ndarray:
    """Return smooth pictures of 224 × 224, values from 0 to 255."""
    coarse = np.random.default_rng(seed).uniform(0, 255, (count, 14, 14, 3))
    fine = np.asarray(keras.ops.image.resize(coarse.astype(np.float32), (224, 224)))
    return np.clip(fine, 0, 255)


def build_net(name: str, seed: int) -> keras.Model:
    """Return a net with drawn weights and the moments of drawn images."""
    keras.utils.set_random_seed(seed)
    net = NETS[name](weights=None, classifier_activation=None)
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.3
    for part in range(6):
        net(draw_images(8, seed + 100 + part), training=True)
    return net


def write_by_nncf(net: keras.Model, folder: Path, peer: str, seed: int) -> None:
    """Write the net in FP32, and the file that NNCF makes of it."""
    net.export(folder / "saved", verbose=False)
    program = openvino.convert_model(folder / "saved")
    openvino.save_model(program, folder / "fp32.xml", compress_to_fp16=False)
    name = program.inputs[0].any_name
    np.savez(folder / "data.npz", **{name: draw_images(CALIBRATION, seed + 1)})
    files = folder / "fp32.xml", folder / "data.npz", folder / "nncf.xml"
    run_child("peers.runtime_peers", "nncf", *files, python=peer)


def tune(net: keras.Model, size: int, seed: int, most_noise: float, folder: Path) -> Any:
    """Return the fastest model of any runtime at most as noisy as given."""
    images = draw_images(JUDGED, seed + 2)
    expected = np.asarray(net(images))
    judged = [(images[i : i + size], expected[i : i + size]) for i in range(0, JUDGED, size)]
    return MixedPrecision(
        model=net,
        runtime="auto",
        metric=fidelity,
        eval_dataloader=judged,
        calib_dataloader=np.split(draw_images(CALIBRATION, seed + 1), CALIBRATION // size),
        sampling_size=CALIBRATION,
        accuracy_criterion=AccuracyCriterion(most_noise, relative=False),
        workspace=folder / f"workspace{size}",
        cache=False,
    )()


def measure_case(name: str, size: int, options: argparse.Namespace, folder: Path) -> list[str]:
    """Return the row of a net at a batch size."""
    seed = options.seed
    net = build_net(name, seed)
    write_by_nncf(net, folder, options.peer, seed)
    images = draw_images(JUDGED, seed + 2)
    expected = np.asarray(net(images))

    def measure_noise(call: Call) -> float:
        parts = [call((images[i : i + size],)) for i in range(0, JUDGED, size)]
        return noise(expected, np.concatenate(parts))

    example = (images[:size],)
    calls = {
        NNCF: compile_for_openvino(folder / "nncf.xml", example, {}),
        NNCF_F32: compile_for_openvino(folder / "nncf.xml", example, F32),
        OPENVINO: compile_for_openvino(folder / "fp32.xml", example, F32),
    }
    noises = {label: measure_noise(call) for label, call in calls.items()}
    result = tune(net, size, seed, noises[NNCF_F32] * SLACK, folder)
    calls[OURS] = lambda inputs: np.asarray(result(*inputs))
    noises[OURS] = measure_noise(calls[OURS])
    runs = {label: repeat_call(call, example, time.process_time) for label, call in calls.items()}
    seconds = run_in_turn(runs, options.rounds)
    speeds = [estimate_latency_ratio(seconds[over], seconds[OURS]) for over in (NNCF, NNCF_F32)]
    return [
        f"{name} {size}",
        str(result.framework),
        *(f"{1e3 * min(seconds[label]):.2f}" for label in (OURS, NNCF, NNCF_F32, OPENVINO)),
        *(f"{speed.value:.2f} (≥ {speed.low:.2f})" for speed in speeds),
        *(f"{-10 * math.log10(noises[label]):.1f}" for label in (OURS, NNCF, NNCF_F32)),
    ]


def main() -> None:
    """Race all cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--peer", required=True, help="a Python with nncf and openvino")
    parser.add_argument("--only", nargs="+", choices=list(NETS), default=list(NETS))
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    Measurement.uses_cpu_seconds = True  # type: ignore[method-assign, assignment]
    ways = ("ours", NNCF, NNCF_F32, OPENVINO)
    headings = (
        "net, batch", "runtime", *(f"ms, {way}" for way in ways),
        "ours over its own hint", "ours over f32", "dB, ours", "dB, own hint", "dB, f32",
    )  # fmt: skip
    rows = []
    for name, size in CASES:
        if name in options.only:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(measure_case(name, size, options, Path(folder)))
            table = make_table(f"Keras with runtime=auto, seed {options.seed}", *headings)
            for row in rows:
                table.add_row(*row)
            Console(width=200).print(table)


if __name__ == "__main__":
    main()
