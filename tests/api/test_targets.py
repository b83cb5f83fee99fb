"""What can be converted for, and what is refused, from all three faces."""

import json

import pytest

from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.api.portability import find_target_hardware
from neural_mp.config import parse_settings
from neural_mp.core.hardware import TARGETS, Hardware, detect
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, PlanError

pytestmark = pytest.mark.usefixtures("quick_runs")

EXACT, SATURATING = Int8Accumulation.EXACT, Int8Accumulation.SATURATING


class Saturating(PyTorchAdaptor):
    """On a processor without VNNI, whatever this one has."""

    def int8_accumulation(self, hardware):
        products = hardware.int8_accumulation if hardware.target != "this" else SATURATING
        return dict.fromkeys(KernelKind, products)


@pytest.mark.parametrize(
    ("target", "products"),
    [
        ("portable", SATURATING),
        ("avx2", SATURATING),
        ("avx512", SATURATING),
        ("vnni", EXACT),
        ("amx", EXACT),
        ("arm-dotprod", EXACT),
    ],
)
def test_what_a_target_stands_for(target, products):
    hardware = detect({}).for_target(target)
    assert hardware.int8_accumulation is products
    assert hardware.support(Precision.BF16).native == (target == "amx")
    assert hardware.for_target("this") is hardware


def test_every_target_is_told_apart():
    assert len(TARGETS) == 7


def test_arm_and_vnni_are_exact_and_what_is_not_known_is_taken_to_saturate():
    for flags in ({"avx512_vnni"}, {"avx_vnni"}, {"amx_int8"}, {"asimd"}, {"asimddp"}):
        assert Hardware(flags=frozenset(flags)).int8_accumulation is EXACT
    for flags in (set(), {"avx2"}, {"avx2", "avx512f"}):
        assert Hardware(flags=frozenset(flags)).int8_accumulation is SATURATING


def test_exact_products_are_not_converted_for_where_they_cannot_be_checked():
    with pytest.raises(ConfigurationError, match=r"'vnni'.*saturate.*'portable'"):
        find_target_hardware("vnni", detect({}), Saturating())
    hardware, (warning,) = find_target_hardware("avx2", detect({}), Saturating())
    assert hardware.target == "avx2"
    assert "measured on this machine" in warning


def test_an_unknown_target_is_named_with_the_nearest():
    converter = MixedPrecision()
    converter.model, converter.target = object(), "vnn"
    with pytest.raises(ConfigurationError, match=r"'vnn'.*did you mean 'vnni'"):
        converter()


def test_a_tuning_file_names_its_target(net):
    assert parse_settings("target: portable").options.target == "portable"
    with pytest.raises(ConfigurationError, match=r"line 1: target: expected one of this, portable"):
        parse_settings("target: avx3")


def test_weights_alone_have_a_reduced_range():
    spec = QuantSpec.parse("int8 symmetric per_channel reduced_range")
    assert QuantSpec.parse(str(spec)) == spec
    assert "full_range" not in str(QuantSpec("int8", "symmetric", "per_channel"))
    with pytest.raises(PlanError, match="requires dtype int8"):
        QuantSpec("uint8", "asymmetric", "per_tensor", range="reduced_range")
    with pytest.raises(PlanError, match="range of an activation"):
        OpConfig(
            Precision.INT8,
            spec,
            QuantSpec("int8", "symmetric", "per_tensor", range="reduced_range"),
        )


@pytest.mark.slow
def test_the_command_says_where_a_result_is_right(run_command, saved_portable):
    code, out, _ = run_command("inspect", str(saved_portable))
    assert code == 0
    assert "exact on every CPU" in out
    assert "reduced_range" in out
    code, out, _ = run_command("inspect", str(saved_portable), "--json")
    assert json.loads(out)["exact_on"] == "every CPU"


def test_the_command_shows_how_each_framework_multiplies(run_command):
    code, out, _ = run_command("hardware", "--json")
    assert code == 0
    products = json.loads(out)["int8_accumulation"]
    assert set(products["pytorch"]) == {"convolution", "depthwise", "dense"}
    assert {"pytorch", "tensorflow", "onnxrt"} <= set(products)
    code, out, _ = run_command("hardware")
    assert "exact" in out


@pytest.fixture
def saved_portable(net, digits, tmp_path):
    converter = MixedPrecision()
    converter.model, converter.precisions, converter.target = net, "int8", "portable"
    converter.calib_dataloader = digits[0].loader()
    converter().save(tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def run_command(monkeypatch, capsys):
    """Run `neural-mp`; its exit code, output and errors."""
    import sys

    from neural_mp.cli import app

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["neural-mp", *arguments])
        with pytest.raises(SystemExit) as ended:
            app.main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return call
