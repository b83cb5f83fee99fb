import subprocess
import sys

import pytest

from neural_mp.core.hardware import Gpu, Hardware, detect, parse_macos_features, require_any
from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.core.precision import Precision
from neural_mp.errors import UnsupportedPrecisionError

INT8, BF16, FP16, FP32 = Precision.INT8, Precision.BF16, Precision.FP16, Precision.FP32


def test_a_precision_is_native_where_its_flag_is_there():
    machine = Hardware(flags=frozenset({"avx512_vnni", "amx_bf16"}))
    assert machine.support(INT8).native
    assert machine.support(BF16).native
    assert "amx_bf16" in machine.support(BF16).reason
    assert not machine.support(FP16).available


def test_nothing_is_guessed_from_the_name_of_the_cpu():
    named = Hardware("Intel(R) Xeon(R) Platinum 8480+ (Sapphire Rapids)")
    assert not named.support(BF16).available


def test_bf16_alone_without_hardware_names_the_flag_and_the_way_out(plain_machine):
    with pytest.raises(UnsupportedPrecisionError, match=r"avx512_bf16.*FORCE_BF16=1"):
        require_any(plain_machine, (BF16,))
    with pytest.raises(UnsupportedPrecisionError, match=r"avx512_fp16.*FORCE_FP16=1"):
        require_any(plain_machine, (FP16,))


def test_bf16_beside_int8_without_hardware_is_a_warning(plain_machine):
    usable, warnings = require_any(plain_machine, (INT8, BF16))
    assert usable == (INT8,)
    assert len(warnings) == 1
    assert "bf16 is not supported" in warnings[0]


@pytest.mark.parametrize(("value", "forced"), [("1", True), ("0", False), ("", False)])
def test_force_bf16_switches_it_on(value, forced):
    machine = detect({"FORCE_BF16": value})
    assert (BF16 in machine.forced) is forced


def test_forced_is_available_but_not_native():
    support = Hardware(forced=frozenset({BF16})).support(BF16)
    assert support.available
    assert not support.native
    assert "FORCE_BF16=1" in support.reason


def test_a_gpu_is_judged_by_its_compute_capability():
    volta = Hardware(gpus=(Gpu("V100", (7, 0)),))
    assert volta.support(FP16, "gpu").native
    assert not volta.support(BF16, "gpu").available
    assert "requires 8.0" in volta.support(BF16, "gpu").reason
    assert not Hardware().support(FP16, "gpu").available


def test_detection_agrees_with_torch_on_this_machine():
    import torch

    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("torch before 2.10 lists no capabilities of the CPU")
    flags = torch.cpu.get_capabilities()
    machine = detect({})
    has_exact_sums = any(flags.get(flag, False) for flag in ("avx512_vnni", "avx_vnni", "amx_int8"))
    assert (machine.int8_accumulation is Int8Accumulation.EXACT) == has_exact_sums
    assert machine.support(BF16).native == any(
        flags.get(flag, False) for flag in ("avx512_bf16", "amx_bf16")
    )


def test_the_library_used_where_the_kernel_does_not_tell_agrees(monkeypatch):
    from neural_mp.core import hardware

    kernel, library = hardware._cpu_from_kernel(), hardware._cpu_from_library()
    if kernel is None:
        pytest.skip("no /proc/cpuinfo here")
    assert ("avx512_vnni" in kernel[1]) == ("avx512_vnni" in library[1])


def test_asking_the_hardware_imports_no_framework():
    code = (
        "import sys, neural_mp.core.hardware as h; h.detect(); "
        "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


#: `sysctl hw.optional` of an Apple M2, shortened.
_MACOS_LISTING = """\
hw.optional.AdvSIMD: 1
hw.optional.arm.FEAT_BF16: 1
hw.optional.arm.FEAT_DotProd: 1
hw.optional.arm.FEAT_FP16: 1
hw.optional.arm.FEAT_I8MM: 1
hw.optional.arm.FEAT_SME: 0
hw.optional.arm64: 1
"""


def test_arm_features_of_macos_are_those_that_linux_lists():
    flags = parse_macos_features(_MACOS_LISTING)
    assert flags == {"asimd", "asimddp", "asimdhp", "bf16", "i8mm"}
    machine = Hardware(flags=flags)
    assert all(machine.support(precision).native for precision in (INT8, BF16, FP16))
    assert not parse_macos_features("hw.optional.avx2_0: 1\nhw.optional.arm.FEAT_BF16: 0\n")
