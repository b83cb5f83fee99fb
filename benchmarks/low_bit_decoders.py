"""Decode and prefill of a decoder-shaped stack of layers, by form of its weights.

    OMP_NUM_THREADS=1 python -m benchmarks.low_bit_decoders [--layers 4] [--rounds 15]

The layers have the widths of a decoder of 0.5 billion weights (Qwen2.5-0.5B) and random weights;
the products of attention, which read no weights, are left out. Every form is a plan, converted by
`convert_with_plan` in ONNX Runtime and in OpenVINO, and audited. Figures are ratios of the CPU time
of FP32 in the same runtime to that of the form, in interleaved calls of one thread: medians of
rounds. INT8 takes ranges of every run in ONNX Runtime, and calibrated ranges in OpenVINO.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import onnx

from benchmarks.decoders.onnx_stack import HEADINGS, Stack, rows_of
from benchmarks.measurement.tables import markdown_table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4, help="number of layers")
    parser.add_argument("--rounds", type=int, default=15, help="interleaved calls of each form")
    parser.add_argument(
        "--runtimes", nargs="+", default=["onnxrt", "openvino"], help="the runtimes to measure"
    )
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack.onnx"
        onnx.save(Stack().model(options.layers), path)
        for runtime in options.runtimes:
            rows += rows_of(runtime, path, options.rounds)
    print(markdown_table(HEADINGS, rows))


if __name__ == "__main__":
    main()
