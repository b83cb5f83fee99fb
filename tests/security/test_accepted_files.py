"""Ordinary files that the frameworks made themselves are taken: some, and all of them in full.

A file counts if the framework itself reads and runs it. Outputs are compared with those of the
framework.
"""

from __future__ import annotations

import gc
import importlib
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest
from accepted.cases import Outcome, Result

#: Kind of file → module of `accepted` with its cases.
MODULES = {
    "keras": "keras_models",
    "savedmodel": "saved_models",
    "exports": "exports",
    "onnx": "onnx_models",
}
#: Kind of file → the largest accepted fraction of refused files.
LIMITS = {"keras": 0.02, "savedmodel": 2 / 27, "exports": 0.0, "onnx": 0.0}
#: Kind of file → the least number of files that the framework itself runs.
LEAST = {"keras": 300, "savedmodel": 27, "exports": 51, "onnx": 300}
#: One file of each sort that was once refused for a wrong reason, and some others.
SAVED_MODELS = (
    "keras_TextVectorization",
    "keras_random_at_inference",
    "jit_compiled",
    "generator",
    "text_asset",
    "table_in_a_loop",
    "v1_asset",
    "split",
    "control_flow",
    "pictures",
)
KERAS = (
    "GroupQueryAttention.h5",
    "AdaptiveMaxPooling1D.keras",
    "AdaptiveAveragePooling3D.h5",
    "StringLookup_adapted.keras",
    "TextVectorization_tf_idf.keras",
    "features.keras",
    "IntegerLookup.h5",
    "LSTM_dropout.keras",
    "quantized_int8.keras",
    "augmented.h5",
)
EXPORTS = (
    "resnet_core.pt2",
    "unet.pt2",
    "lstm.pt2",
    "bags_core.pt2",
    "weight_norm.pt2",
    "sampled.pt2",
    "written.pt2",
    "branches.pt2",
    "loops.pt2",
    "spectra_core.pt2",
    "divided.pt2",
    "gpt2.pt2",
)
ONNX = (
    "traced_resnet_7.onnx",
    "traced_lstm_9.onnx",
    "traced_unet_11.onnx",
    "helper_net_8.onnx",
    "helper_controlled_13.onnx",
    "helper_quantized_25.onnx",
    "simple_test_sequence_model4.onnx",
    "simple_test_expand_shape_model2.onnx",
)


NAMES = {"savedmodel": SAVED_MODELS, "keras": KERAS, "exports": EXPORTS, "onnx": ONNX}


def read_files(kind: str, folder: Path, names: Collection[str] = ()) -> list[Result]:
    """Return the outcomes of a kind of file, of the named ones or of all."""
    module = importlib.import_module(f"accepted.{MODULES[kind]}")
    gc.freeze()  # Keras collects garbage for every file, and need not look through the frameworks
    cases = [case for case in module.CASES.all if not names or case.name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return list(module.results(cases, folder))


def reasons_of(results: Collection[Result]) -> str:
    return "\n".join(f"{r.case.name}: {r.outcome.value}: {r.reason[:400]}" for r in results)


@pytest.mark.slow
@pytest.mark.parametrize("kind", NAMES)
def test_good_files_are_taken_with_equal_outputs(kind, tmp_path):
    results = read_files(kind, tmp_path, NAMES[kind])
    assert len(results) == len(NAMES[kind])
    assert [result for result in results if result.outcome is not Outcome.TAKEN] == []


@pytest.mark.full
@pytest.mark.parametrize("kind", LIMITS)
def test_hardly_any_good_file_is_refused(kind, tmp_path):
    results = read_files(kind, tmp_path)
    counts = Counter(result.outcome for result in results)
    counted = len(results) - counts[Outcome.NOT_RUN]
    failures = [
        result for result in results if result.outcome in (Outcome.WRONG, Outcome.TRACEBACK)
    ]
    refused = [result for result in results if result.outcome is Outcome.REFUSED]
    assert not failures, reasons_of(failures)
    assert len(refused) <= LIMITS[kind] * counted, reasons_of(refused)
    assert counted >= LEAST[kind]
