"""INT8 files by the peers' own tools, run by a Python that has them: NNCF, ONNX Runtime, torchao.

    PEER -m benchmarks.peers.runtime_peers nncf|static|pt2e SOURCE DATA TARGET

SOURCE is an ONNX file, for `nncf` also one of OpenVINO, or the exported program for `pt2e`; DATA an
`.npz` of calibration samples by input, in batches of eight or of the file's size. Prints CPU and
wall seconds of all parts, and the peak memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.measurement.clock import Clock, peak_memory

Feeds = dict[str, np.ndarray]
_BATCH = 8


def batches(path: Path, source: Path) -> Iterator[Feeds]:
    """Yield the samples in batches of the size that an ONNX file takes."""
    samples, size = dict(np.load(path)), _fixed_batch(source) or _BATCH
    for start in range(0, len(next(iter(samples.values()))), size):
        yield {name: array[start : start + size] for name, array in samples.items()}


def _fixed_batch(source: Path) -> int:
    """Return the size of the first axis of an ONNX file, 0 if dynamic or another file."""
    if source.suffix != ".onnx":
        return 0
    import onnx

    graph = onnx.load(source, load_external_data=False).graph
    return int(graph.input[0].type.tensor_type.shape.dim[0].dim_value)


def nncf(source: Path, data: Path, target: Path, clock: Clock) -> None:
    """As its documentation advises for OpenVINO."""
    import nncf
    import openvino

    feeds = list(batches(data, source))
    is_transformer = len(feeds[0]) > 1
    with clock.part("read"):
        if source.suffix == ".xml":
            model = openvino.Core().read_model(source)
        else:  # folds batch norms, without which the result loses
            model = openvino.convert_model(source)
    with clock.part("calibrate + convert"):
        quantized_model = nncf.quantize(
            model,
            nncf.Dataset(feeds),
            preset=nncf.QuantizationPreset.MIXED,
            model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
            subset_size=len(feeds),
        )
    openvino.save_model(quantized_model, target, compress_to_fp16=False)


def static(source: Path, data: Path, target: Path, clock: Clock) -> None:
    """With the preprocessing that its documentation asks for, weights per channel."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    from benchmarks.peers.static_quantization import write_static

    prepared = target.with_suffix(".prepared.onnx")
    with clock.part("read"):
        quant_pre_process(str(source), str(prepared))
    with clock.part("calibrate + convert"):
        write_static(prepared, target, batches(data, source))


def pt2e(source: Path, data: Path, target: Path, clock: Clock) -> None:
    """Compiled ahead of time for the batch size of the program, since a file is needed."""
    import torch

    from benchmarks.peers.pt2e import quantized

    with clock.part("read"):
        program = torch.export.load(source)
    size = len(program.example_inputs[0][0])
    samples = [torch.from_numpy(array).split(size) for array in np.load(data).values()]
    with clock.part("calibrate + convert"):
        converted = quantized(program.module(check_guards=False), zip(*samples, strict=True))
    with clock.part("compile"), torch.no_grad():
        exported = torch.export.export(converted, program.example_inputs[0])
        options = {"freezing": True}
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(target), inductor_configs=options
        )


def main() -> None:
    tool, *paths = sys.argv[1:]
    clock = Clock()
    {"nncf": nncf, "static": static, "pt2e": pt2e}[tool](*map(Path, paths), clock)
    print(json.dumps({"parts": clock.parts, "peak_bytes": peak_memory()}))


if __name__ == "__main__":
    main()
