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


def build(name: str, seed: int, batches: int, folder: Path | None = None) -> ZooCase:
    """Return the model of a test with the inputs of its data sets.

    Raises:
        NotBuiltError: the runtime does not run the original model.
    """
    import onnxruntime

    test = _tests()[name]
    try:
        model, data_sets = _model_and_data(test)
        content = model.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
        input_names = [value.name for value in session.get_inputs()]
        data = [dict(zip(input_names, values, strict=True)) for values in data_sets]
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

    return ZooCase(model, repeated, run, "data of the test")


def _model_and_data(test: Any) -> tuple[Any, list[list[Any]]]:
    """Return the model of a test, and the inputs of its data sets."""
    import onnx

    if test.model is not None:
        return test.model, [list(inputs) for inputs, _ in test.data_sets]
    root = Path(test.model_dir)
    folders = sorted(root.glob("test_data_set_*"))
    return onnx.load(root / "model.onnx"), [_inputs(folder) for folder in folders]


def _inputs(folder: Path) -> list[Any]:
    """Return the inputs of a data set."""
    import onnx
    from onnx import numpy_helper

    values = []
    for file in sorted(folder.glob("input_*.pb"), key=lambda file: int(file.stem.split("_")[1])):
        tensor = onnx.TensorProto()
        tensor.ParseFromString(file.read_bytes())
        values.append(numpy_helper.to_array(tensor))
    return values
