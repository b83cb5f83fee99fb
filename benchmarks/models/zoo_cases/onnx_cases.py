"""The node and model tests that the package `onnx` ships."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from zoo_cases.case import NotBuiltError, ZooCase

#: Kinds of tests whose files the package holds.
_KINDS = ("node", "simple", "pytorch-converted", "pytorch-operator")


@cache
def _tests() -> dict[str, Any]:
    from onnx.backend.test.loader import load_model_tests

    return {f"{kind}/{case.name}": case for kind in _KINDS for case in load_model_tests(kind=kind)}


def names() -> list[str]:
    """Return kind and name of every test."""
    return sorted(_tests())


def build_warm_up() -> ZooCase:
    """Return a small model."""
    return build("node/test_matmul_2d", 0, 1)


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return the model of a test with the inputs of its data sets.

    Raises:
        NotBuiltError: the runtime does not run the original model.
    """
    import onnxruntime

    root = Path(_tests()[name].model_dir)
    file = root / "model.onnx"
    try:
        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        taken = [value.name for value in session.get_inputs()]
        data = [_inputs(each, taken) for each in sorted(root.glob("test_data_set_*"))]
        outputs = [session.run(None, batch) for batch in data]
    except Exception as error:
        line = " ".join(str(error).split())
        raise NotBuiltError(f"ONNX Runtime: {line[:200]}") from error
    if not data or not outputs:
        raise NotBuiltError("the test has no data")
    repeated = [data[number % len(data)] for number in range(batches)]
    names = [value.name for value in session.get_outputs()]
    single = len(names) == 1

    def run(batch: Any) -> Any:
        results = session.run(None, batch)
        return results[0] if single else results

    return ZooCase(str(file), repeated, run, "data of the test")


def _inputs(folder: Path, names: list[str]) -> dict[str, Any]:
    """Return the inputs of a data set by name."""
    import onnx
    from onnx import numpy_helper

    values: dict[str, Any] = {}
    files = sorted(folder.glob("input_*.pb"), key=lambda file: int(file.stem.split("_")[1]))
    for name, file in zip(names, files, strict=True):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(file.read_bytes())
        values[name] = numpy_helper.to_array(tensor)
    return values
