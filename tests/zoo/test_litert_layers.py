"""One small model per Keras layer class, as TensorFlow converts the model for LiteRT.

Outputs are compared with Keras' own, and with those of a plain interpreter.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers
from litert_files import find_contradiction, list_file_ops
from litert_nets import as_litert, fix_batch, run_signature
from zoo.harness import Built, Case, Ran, Row, check_page, convert
from zoo.keras_cases import CASES

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision
from neural_mp.errors import ModelLoadError

_MAX_REASON_CHARACTERS = 120


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_layer_is_converted_as_planned_saved_and_loaded(
    case: Case, tmp_path: Path, record_row: Callable[[str, Row], None]
) -> None:
    if not hasattr(layers, case.name.split()[0]):
        pytest.skip("this Keras has no such layer")
    built = case.build()
    try:
        content, note = convert_net(built)
    except Exception as error:  # noqa: BLE001 (the converter raises whatever its passes raise)
        record_row("litert", Row(case.name, {}, float("nan"), describe_error(error)))
        return
    flattened = [list(map(np.asarray, keras.tree.flatten(batch))) for batch in built.batches]
    batches = [batch if len(batch) > 1 else batch[0] for batch in flattened]
    taken_in = Built(content, batches, built.outputs, built.options)

    def audit(result: OptimizedModel) -> Ran:
        check_file(result, content, flattened)
        return count_precisions(result)

    if "HASHTABLE" in {op.kind for op in list_file_ops(content).values()}:
        with pytest.raises(ModelLoadError, match="'HASHTABLE' is not supported"):
            LiteRtAdaptor().load(content)
        record_row("litert", Row(case.name, {}, float("nan"), "HASHTABLE is refused"))
        return
    row = convert(replace(case, build=lambda: taken_in), tmp_path, audit)
    record_row("litert", replace(row, note=note))


def convert_net(built: Built) -> tuple[bytes, str]:
    """Return a file, for a free batch size if the converter can, and a note if not."""
    try:
        return as_litert(built.model), ""
    except Exception:  # noqa: BLE001 (see above)
        samples = len(keras.tree.flatten(built.batches[0])[0])
        return as_litert(fix_batch(built.model, samples)), "fixed batch"


def describe_error(error: Exception) -> str:
    """Return the first sentence of an error without places, safe in a table."""
    found = re.search(r"error: (?:loc\(.*\): )?(?:error: )?([^\n]*)", str(error))
    text = found.group(1) if found else str(error).splitlines()[0]
    return re.sub(r"[|`*<>]", "", text)[:_MAX_REASON_CHARACTERS]


def check_file(result: OptimizedModel, given: bytes, batches: list[list[np.ndarray]]) -> None:
    """Check that a file has the types of its plan, and equal outputs in a plain interpreter."""
    content = result.adaptor.native(result.held)
    normalized = result.adaptor.native(result.adaptor.load(given))
    assert not find_contradiction(result.planned, normalized, content)
    ports = result.held.signature.inputs
    names = [port.name for port in result.held.signature.outputs]
    for batch in batches:
        feeds = {port.name: array for port, array in zip(ports, batch, strict=True)}
        plain = run_signature(content, feeds)
        outputs = result.loaded(batch if len(batch) > 1 else batch[0])
        arrays = outputs if isinstance(outputs, list) else [outputs]
        for name, array in zip(names, arrays, strict=True):
            np.testing.assert_array_equal(plain[name], array)


def count_precisions(result: OptimizedModel) -> Ran:
    """Return the precisions of the ops in a file, whose plan holds."""
    ops = list_file_ops(result.adaptor.native(result.held))
    return Counter(
        (op.kind, Precision.INT8 if result.planned[name].precision.is_integer else Precision.FP32)
        for name, op in ops.items()
        if name in result.planned
    )


def test_the_page_lists_every_case() -> None:
    check_page("litert", CASES)
