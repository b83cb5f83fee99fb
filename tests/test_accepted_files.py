"""Ordinary files that the frameworks made themselves are taken: a part of the benchmark."""

from __future__ import annotations

import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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


@pytest.fixture
def benchmark(monkeypatch):
    """The path of the benchmark; it runs here, where the frameworks are imported already.

    Its modules are imported from its own folder, whatever has their names, and do not stay.
    """
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    names = [file.stem for file in (ROOT / "benchmarks" / "accepted").glob("*.py")]
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with warnings.catch_warnings():
        yield ROOT / "benchmarks" / "accepted_files.py"
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.slow
def test_good_files_are_taken_with_equal_outputs(benchmark, monkeypatch, capsys):
    names = [name for of_kind in NAMES.values() for name in of_kind]
    monkeypatch.setattr(sys, "argv", [str(benchmark), "--names", *names])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(benchmark), run_name="__main__")
    printed, complaints = capsys.readouterr()
    assert ended.value.code == 0, printed[-3000:] + complaints[-3000:]
    for kind, of_kind in NAMES.items():
        expected = f"{kind}: {len(of_kind)} files, {len(of_kind)} taken, 0 refused"
        assert expected in printed, printed
