"""Profiles of targets: shipped ones load and are consistent, a user's own is read strictly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import pytest
import yaml

import neural_mp.targets
from neural_mp.core.enums import QuantDType
from neural_mp.errors import ConfigurationError
from neural_mp.targets import Widths, is_profile, load_profile, profile_names
from neural_mp.targets.profile import ALIASES

FOLDER = Path(neural_mp.targets.__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))
QDQ = yaml.safe_load((FOLDER / "qdq.yaml").read_text())


def write(tmp_path, changes) -> str:
    """The path of a profile that differs from `qdq`; a key whose value is None is missing."""
    document = {key: value for key, value in {**QDQ, **changes}.items() if value is not None}
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump(document))
    return str(path)


def test_masks_are_clipped_unless_a_profile_lists_its_rewrites(tmp_path):
    assert load_profile(write(tmp_path, {"rewrites": None})).rewrites == ("mask_clip",)
    assert load_profile(write(tmp_path, {"rewrites": []})).rewrites == ()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_shipped_profile_is_consistent(file):
    profile = load_profile(file.stem)
    assert profile.name == file.stem
    assert profile.sources
    types = profile.ops.keys() | {kind for group in profile.others for kind in group.types}
    assert not types & profile.float_only.keys()
    assert not types & profile.refuse
    assert not profile.same_scale & types, "moving ops follow their producer and have no widths"
    for kind in types | profile.same_scale | profile.float_only.keys():
        # Every op type is one of ONNX: a misspelt one would never be quantized.
        onnx.defs.get_schema(kind, max(profile.opset[1], 23))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_width_of_a_shipped_profile_has_types_and_a_cost(file):
    profile = load_profile(file.stem)
    for kind, widths in profile.ops.items():
        for width in widths:
            assert profile.activation.of_bits(width.activation_bits) is not None
            assert profile.weight.of_bits(kind, width.weight_bits) is not None
            assert profile.cost.macs[width] > 0
    for group in profile.others:
        for width in group.widths:
            assert width.weight_bits is None
            assert profile.cost.macs[width] > 0


def test_the_names_are_those_of_the_files_and_their_other_names():
    assert set(profile_names()) == {file.stem for file in FILES} | ALIASES.keys()
    assert load_profile("vitisai") == load_profile("vitisai-xint8")
    assert all(map(is_profile, profile_names()))
    assert not is_profile("avx2")


def test_qnn_has_the_types_that_were_measured():
    profile = load_profile("qnn")
    assert profile.is_measured
    assert profile.activation.types == (QuantDType.UINT8, QuantDType.UINT16)
    assert profile.weight.of_bits("LayerNormalization", 8) is QuantDType.UINT8
    assert profile.weight.of_bits("Conv", 8) is QuantDType.INT8
    assert profile.widths_of("Log") == (Widths.A8,)
    assert profile.widths_of("LSTM") == ()
    assert profile.options == {"soc_model": "60"}


def test_a_users_own_file_is_a_profile(tmp_path):
    path = write(tmp_path, {"name": "mine", "ops": {"Conv": ["w8a8"]}})
    assert is_profile(path)
    profile = load_profile(path)
    assert profile.name == "mine"
    assert profile.widths_of("Conv") == (Widths.W8A8,)
    assert profile.widths_of("Gemm") == ()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema": 2}, "schema: expected 1"),
        ({"activation": None}, "expected the key 'activation'"),
        ({"activation": {"types": ["int7"], "scheme": "symmetric"}}, "activation.types.0"),
        (
            {"activation": {"types": ["int8"], "scheme": "symetric"}},
            "activation.scheme: expected one of symmetric, asymmetric",
        ),
        ({"weight": {"types": ["int8"], "granularity": "per_group"}}, "weight.granularity"),
        ({"ops": {"Conv": ["w4a8"]}}, "ops.Conv.0: expected one of a8, w8a8, a16"),
        ({"opset": [21, 13]}, "opset: expected the least and the newest opset, e.g. [13, 21]"),
        ({"same_scale": "Reshape"}, "same_scale: expected a list of op types"),
        ({"rewrites": ["erf_to_gleu"]}, "did you mean 'erf_to_gelu'?"),
        ({"cost": {"macs": {"w8a8": 0}, "float_mac": 1}}, "cost.macs.w8a8: expected a finite"),
        ({"fixed": {"Tanh": {"uint16": [1]}}}, "fixed.Tanh.uint16: expected a list of 2"),
        ({"placment": {}}, "unknown key 'placment'; did you mean 'placement'?"),
        ({"placement": {"input": "all"}}, "placement: unknown key 'input'; did you mean 'inputs'?"),
    ],
)
def test_an_error_names_the_file_the_field_and_the_values(tmp_path, changes, message):
    path = write(tmp_path, changes)
    with pytest.raises(ConfigurationError) as error:
        load_profile(path)
    assert repr(path) in str(error.value)
    assert message in str(error.value)
    assert "docs/targets.md" in str(error.value)


def test_an_unknown_name_and_a_missing_file_are_errors(tmp_path):
    with pytest.raises(ConfigurationError, match="did you mean 'tensorrt'") as error:
        load_profile("tensor-rt")
    assert "or the path of a profile" in str(error.value)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_profile(str(tmp_path / "missing.yaml"))


def test_loading_a_profile_imports_no_framework():
    code = (
        "import sys; from neural_mp.targets import load_profile; load_profile('qnn')\n"
        "assert not {'onnx', 'onnxruntime', 'torch', 'pydantic'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
