"""The fastest runtime for known nets: ours with `runtime=auto`, beside FP32 and other tools' INT8.

    python -m benchmarks.runtimes [--peer ENV/bin/python] [--models resnet50,bert,…|architectures]
                                  [--batches 1,8] [--rounds 25] [--only speed,own]
                                  [--clock cpu] [--threads 1] [--keep FOLDER]
                                  [--set precisions=bf16 …]

`--models architectures` are the twelve nets of `nets/runtime_nets.py` with random weights.
`--peer` is a Python with NNCF and torchao (and torch, onnx, openvino) in an environment of its own;
its tools write files, which plain OpenVINO, ONNX Runtime and torch run here. ONNX Runtime's own
tool runs in this environment, as does TFLite, which starts from Keras models of the same build.
Ours starts from the torch module and may be as noisy as NNCF, or, without a peer, have an SQNR of
13 dB. The part `own` adds ours in PyTorch, torch.compile, ONNX Runtime and, from the Keras model,
TensorFlow: without a metric and with the settings of `--set`, the fastest plan there. Alone, it
runs nothing in OpenVINO, which does not start with `ONEDNN_MAX_CPU_ISA=AVX2` on a CPU with AVX-512.
All ways run in turn in one process, on the same threads, with static shapes, and without spinning
threads. Calls are compared without imports, ours and NNCF's. `--clock cpu` counts CPU seconds, for
a machine with other load: on one thread, these are the same. Peaks are those of products of large
matrices in torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.runtime_stages import (
    FLOATS,
    NNCF,
    NNCF_F32,
    OPENVINO,
    OURS,
    OWN,
    PEERS,
    PLAIN,
    TORCH,
    run_stage,
)
from benchmarks.measurement.tables import make_table
from benchmarks.nets.runtime_nets import ARCHITECTURES, CASES, case_of
from neural_mp.profiling import Ratio, estimate_latency_ratio, estimate_uncontended_latency

#: Variables that set the number of threads of an op.
_THREADS = ("OMP_NUM_THREADS", "TF_NUM_INTRAOP_THREADS")
#: Noise that ours may have if there is no peer to compare with; else a tenth of a decibel above it.
_MOST_NOISE, _SLACK = 0.05, 1.023
PARTS = ("speed", "own")
OWN_RUNTIMES = ("pytorch", "onnxruntime", "tensorflow")


@dataclass
class Column:
    """The figures of one model at one batch size.

    Attributes:
        name, size: the model and the batch size.
        tuned: what the run of ours reports.
        peer: CPU seconds and peak memory in bytes of NNCF's conversion; empty without NNCF.
        seconds: way → seconds of every round.
        noise: way → its noise.
        operations: multiplications and additions of a call.
        peaks: precision → operations that the machine does a second.
    """

    name: str
    size: int
    tuned: dict[str, Any] = field(default_factory=dict)
    peer: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    noise: dict[str, float] = field(default_factory=dict)
    operations: int = 0
    peaks: dict[str, float] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The model and the batch size."""
        return f"{self.name} {self.size}"

    def speed(self, label: str, over: str) -> Ratio | None:
        """Return the speed of a way relative to another; None if one was not timed."""
        if label not in self.seconds or over not in self.seconds:
            return None
        return estimate_latency_ratio(self.seconds[over], self.seconds[label])

    def share(self, label: str, precision: str) -> str:
        """Return the operations a second of a way as a share of the machine's peak, in percent."""
        if label not in self.seconds:
            return ""
        rate = self.operations / estimate_uncontended_latency(self.seconds[label])
        return f"{rate / self.peaks[precision]:.0%}"

    def best(self, labels: tuple[str, ...]) -> str | None:
        """The fastest of some ways."""
        timed = [label for label in labels if label in self.seconds]
        return min(
            timed, key=lambda label: estimate_uncontended_latency(self.seconds[label]), default=None
        )

    def speed_over_best(self, label: str, peers: tuple[str, ...]) -> Ratio | None:
        """Return the speed of a way relative to the fastest of others; None if not timed."""
        best = self.best(peers)
        return None if best is None else self.speed(label, best)


@dataclass(frozen=True)
class Bench:
    """Runs the stages, each in a process of its own.

    Attributes:
        options: the command line.
        console: where tables and failures are printed.
        max_seconds: limit of each stage; None for no limit.
    """

    options: argparse.Namespace
    console: Console
    max_seconds: float | None = None

    def stage(self, *arguments: object) -> dict[str, Any] | None:
        """Return the figures of a stage of ours; None after an error, which is printed."""
        return self._child(sys.executable, "runtimes", "--stage", *arguments)

    def peer(self, tool: str, source: Path, target: Path) -> dict[str, Any] | None:
        """The seconds that a tool takes to write its file; None without the tool."""
        python = sys.executable if tool == "static" else self.options.peer
        if python is None:
            return None
        data = source.parent / "calibration.npz"
        return self._child(python, "peers.runtime_peers", tool, source, data, target)

    def written(self, tool: str, source: Path, target: Path) -> None:
        """Let a tool write its file and the figures of its call, unless a kept folder has them."""
        if not target.exists():
            figures = self.peer(tool, source, target)
            target.with_suffix(".json").write_text(json.dumps(figures), encoding="utf-8")

    def _child(self, python: object, module: str, *arguments: object) -> dict[str, Any] | None:
        threads = dict.fromkeys(_THREADS, str(self.options.threads))
        variables = {**threads, "TF_NUM_INTEROP_THREADS": "1"}
        try:
            figures: dict[str, Any] | None = run_child(
                module,
                *arguments,
                python=python,
                variables=variables,
                max_seconds=self.max_seconds,
            )
        except ChildError as error:
            last = str(error).splitlines()[-1]
            self.console.print(f"{module} {' '.join(map(str, arguments[:3]))} failed: {last}")
            return None
        return figures

    def columns(self, name: str, folder: Path) -> Iterator[Column]:
        """Yield what is found for a model at each batch size."""
        options, tools = self.options, "speed" in self.options.only
        if not (folder / "fp32.onnx").exists():
            self.stage("make", name, folder)
        most_noise = self._others(name, folder) if tools else _MOST_NOISE
        sizes = map(int, options.batches.split(",")) if options.batches else case_of(name).batches
        for size in sizes:
            tuned: dict[str, Any] = {}
            if tools:
                if options.peer and (shutil.which("g++") or shutil.which("clang++")):
                    program = folder / f"{size}.pt2"
                    if not program.exists():
                        self.stage("export", name, folder, size)
                    self.written("pt2e", program, folder / f"pt2e{size}.pt2")
                tuned = self.stage("tune", name, folder, size, most_noise, options.clock) or {}
            for runtime in OWN_RUNTIMES if "own" in options.only else ():
                self.stage("own", name, folder, size, runtime, *options.set)
            timing = options.rounds, options.clock, options.only
            figures = self.stage("race", name, folder, size, *timing)
            if figures is not None:
                yield Column(name, size, tuned, _call_cost(folder / "nncf.json"), **figures)

    def _others(self, name: str, folder: Path) -> float:
        """Let the other tools write their files; return the noise that ours may have."""
        self.written("nncf", folder / "fp32.onnx", folder / "nncf.xml")
        self.written("static", folder / "fp32.onnx", folder / "static.onnx")
        if name in CASES and not (folder / "lite.tflite").exists():
            self.stage("lite", name, folder)
        judged = self.options.peer and self.stage("judge", name, folder, "nncf.xml")
        return judged["noise"] * _SLACK if judged else _MOST_NOISE


def _call_cost(file: Path) -> dict[str, float]:
    """Read the figures of a call; return its CPU seconds and peak memory, empty if it failed."""
    figures = json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
    if figures is None:
        return {}
    seconds = sum(cpu for cpu, _ in figures["parts"].values())
    return {"cpu": seconds, "peak_bytes": figures["peak_bytes"]}


def column_table(column: Column, clock: str) -> Table:
    """One model at one batch size: every way with its latency, speed and fidelity."""
    headings = ("", f"ms ({clock})", "× of PyTorch FP32", "99 %", "SQNR, dB")
    table = make_table(f"{column.name}, batch {column.size}", *headings)
    for label, seconds in column.seconds.items():
        speed = column.speed(label, TORCH)
        assert speed is not None
        table.add_row(
            f"{label} → {column.tuned.get('runtime')}" if label == OURS else label,
            f"{estimate_uncontended_latency(seconds) * 1e3:.2f}",
            f"{speed.value:.2f}",
            f"{speed.low:.2f} to {speed.high:.2f}",
            decibels(column.noise[label]) if label != TORCH else "",
        )
    return table


def decibels(noise: float) -> str:
    """Return the SQNR of a noise as text."""
    return f"{-10 * math.log10(max(noise, 1e-16)):.2f}"


def summary(columns: list[Column]) -> Table:
    """All columns: speeds over PyTorch FP32, and ours over the best of the others."""
    table = make_table("speed over PyTorch FP32", "", *(column.title for column in columns))
    contenders = dict.fromkeys(contender for column in columns for contender in column.seconds)
    for contender in contenders:
        speeds = [column.speed(contender, TORCH) for column in columns]
        table.add_row(
            contender, *("" if speed is None else f"{speed.value:.2f}" for speed in speeds)
        )
    table.add_section()
    table.add_row("runtime of ours", *(str(column.tuned.get("runtime", "")) for column in columns))
    rows = {
        "ours over the best peer": PEERS,
        "ours over NNCF": (NNCF, NNCF_F32),
        "ours over the best FP32": FLOATS,
    }
    for label, peers in rows.items():
        table.add_row(label, *(_compared(column, OURS, peers) for column in columns))
    table.add_row(
        "by plain OpenVINO over NNCF",
        *(_compared(column, PLAIN, (NNCF, NNCF_F32)) for column in columns),
    )
    table.add_row("SQNR over NNCF's, dB", *map(_fidelity, columns))
    table.add_section()
    for contender, plain in OWN.items():
        table.add_row(
            f"{contender}, over FP32 there", *(_compared(c, contender, (plain,)) for c in columns)
        )
    table.add_section()
    integers = [(contender, "INT8") for contender in (OURS, NNCF, *OWN)]
    for contender, precision in (*integers, (OPENVINO, "FP32"), (TORCH, "FP32")):
        shares = [column.share(contender, precision) for column in columns]
        table.add_row(f"{contender}, share of {precision} peak", *shares)
    for precision in columns[0].peaks:
        rates = [f"{column.peaks[precision] / 1e9:.0f}" for column in columns]
        table.add_row(f"peak {precision}, 10⁹ operations/s", *rates)
    return table


def _compared(column: Column, label: str, peers: tuple[str, ...]) -> str:
    return speed_with_bound(column.speed_over_best(label, peers))


def speed_with_bound(speed: Ratio | None) -> str:
    """Return a speed with its lower bound as text; empty without one."""
    return "" if speed is None else f"{speed.value:.2f} (≥ {speed.low:.2f})"


def _fidelity(column: Column) -> str:
    best = column.best((NNCF, NNCF_F32))
    if best is None or OURS not in column.noise:
        return ""
    gain = 10 * math.log10(column.noise[best] / max(column.noise[OURS], 1e-16))
    return f"{gain:+.1f}"


def run_table(columns: list[Column]) -> Table:
    """Return the table of our runs: CPU seconds, peak memory, both over NNCF's, and the plan."""
    headings = ("", "run", "over NNCF", "choice", "peak MB", "over NNCF", "trials", "target", "ops")
    table = make_table("runs of ours, CPU seconds", *headings)
    for column in columns:
        tuned, peer = column.tuned, column.peer
        if not tuned:
            continue
        plan = ", ".join(f"{count} {precision}" for precision, count in tuned["plan"].items())
        table.add_row(
            column.title,
            f"{tuned['run']:.1f}",
            f"{tuned['run'] / peer['cpu']:.1f}" if peer else "",
            f"{tuned.get('choice', 0.0):.1f}",
            f"{tuned['peak_bytes'] / 1e6:.0f}",
            f"{tuned['peak_bytes'] / peer['peak_bytes']:.2f}" if peer else "",
            str(tuned["trials"]),
            "met" if tuned["met"] else "missed",
            plan,
        )
    return table


@contextmanager
def _folder(keep: str | None) -> Iterator[Path]:
    if keep is not None:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep).resolve()
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield Path(scratch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ", ".join([*CASES, *ARCHITECTURES])
    parser.add_argument(
        "--models",
        default=",".join(CASES),
        help=f"of {names}, or architectures for the last twelve",
    )
    parser.add_argument("--batches", help="batch sizes; default: two of each model")
    parser.add_argument("--peer", help="a Python with nncf, torchao, torch, onnx and openvino")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--threads", type=int, default=os.environ.get("OMP_NUM_THREADS", 1))
    parser.add_argument("--set", nargs="*", default=[], help="NAME=VALUE of ours, for `own`")
    parser.add_argument("--keep", help="a folder for all files, which stay there")
    parser.add_argument("--stage", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        run_stage(options.stage)
        return
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console() if sys.stdout.isatty() else Console(width=160)
    bench, columns = Bench(options, console), list[Column]()
    models = options.models.replace("architectures", ",".join(ARCHITECTURES))
    for name in models.split(","):
        with _folder(options.keep and str(Path(options.keep) / name)) as folder:
            for column in bench.columns(name, folder):
                columns.append(column)
                console.print(column_table(column, options.clock))
    if columns:
        console.print(summary(columns), run_table(columns))


if __name__ == "__main__":
    main()
