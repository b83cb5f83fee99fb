"""Options of `autocast`: lists, precision, environment, log; errors and pickling."""

import copy
import logging
import pickle
import subprocess
import sys

import pytest
import torch
from autocast_nets import BF16, FP16, FP32, amp
from torch import nn
from torch.nn import functional as F

from neural_mp.errors import (
    ConfigurationError,
    NeuralMPError,
    UnknownOperatorError,
    UnknownPrecisionError,
)
from neural_mp.training import autocast

AMP_VARIABLE = "NEURAL_MP_AUTO_MIXED_PRECISION_{}"


def test_all_but_the_clear_list_may_be_forced(square):
    with autocast("bf16", amp(unsafe_force_all=True)):
        assert square.exp().dtype is BF16
        assert F.cross_entropy(square, torch.arange(4)).dtype is BF16
        assert torch.linalg.cholesky(square.T @ square + 10 * torch.eye(4)).dtype is FP32
        assert square.reshape(2, 8).dtype is FP32


def test_the_precision_may_be_said_elsewhere(square, monkeypatch):
    with autocast():
        assert (square @ square).dtype is BF16
    with autocast(amp=amp(data_type="float16")):
        assert (square @ square).dtype is FP16
    monkeypatch.setenv(AMP_VARIABLE.format("DATA_TYPE"), "FLOAT16")
    with autocast():
        assert (square @ square).dtype is FP16
    with autocast("bf16"):
        assert (square @ square).dtype is BF16


def test_the_environment_edits_lists_and_tensorflows_names_are_left(square, monkeypatch, caplog):
    monkeypatch.setenv(AMP_VARIABLE.format("INFERLIST_REMOVE"), "softmax")
    monkeypatch.setenv("ITEX_AUTO_MIXED_PRECISION_ALLOWLIST_ADD", "MatMul")
    with caplog.at_level(logging.WARNING), autocast("bf16"):
        assert (square @ square).softmax(-1).dtype is FP32
    assert "names 'MatMul', which is not an op type of pytorch; the edit is ignored" in caplog.text


def test_the_log_has_what_was_decided(square, tmp_path):
    for _ in range(2):
        with autocast("bf16", amp(log_path=tmp_path / "log")):
            (square @ square).exp()
    lines = (tmp_path / "log" / "autocast_bf16.tsv").read_text().splitlines()
    assert lines[0].split("\t") == ["op type", "list", "dtype of the result", "times"]
    assert sorted(lines[1:]) == ["exp\tdeny\tfloat32\t2", "matmul\tallow\tbfloat16\t2"]


def test_a_model_that_holds_one_can_be_copied_and_saved(square):
    layer = nn.Linear(4, 4)
    layer.context = autocast("fp16", amp(allowlist_remove="linear"))
    with layer.context:
        layer(square)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        with twin.context:
            assert (square @ square).dtype is FP16
            assert twin(square).dtype is FP32


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        (("fp32",), ConfigurationError, "bf16 or fp16, got 'fp32'"),
        (("int8",), ConfigurationError, "bf16 or fp16, got 'int8'"),
        (("bf16,fp16",), ConfigurationError, "a single 16-bit precision"),
        (("bf17",), UnknownPrecisionError, "did you mean 'bf16'"),
        ((16,), UnknownPrecisionError, "must be a string"),
        (("bf16", {"denylist_add": "exp"}), ConfigurationError, "AutoMixedPrecisionOptions"),
        (("bf16", amp(data_type="fp16")), ConfigurationError, "amp.data_type fp16"),
        (("bf16", amp(denylist_add="softmx")), UnknownOperatorError, "did you mean .*'softmax'"),
        (
            ("bf16", amp(denylist_add="matmul")),
            ConfigurationError,
            "remove the type from that list",
        ),
        (("bf16", amp(log_path="/dev/null/x")), ConfigurationError, "cannot be written to"),
    ],
)
def test_bad_options_are_named_before_anything_runs(given, error, said):
    with pytest.raises(error, match=said) as caught:
        autocast(*given)
    assert isinstance(caught.value, NeuralMPError)


@pytest.mark.slow
def test_torchs_compiler_is_not_imported_for_it():
    code = (
        "import sys, torch\nfrom neural_mp.training import autocast\n"
        "with autocast('bf16'): torch.ones(2, 2) @ torch.ones(2, 2)\n"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
