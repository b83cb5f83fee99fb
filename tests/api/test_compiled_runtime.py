"""PyTorch through its compiler as a runtime."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from neural_mp import MixedPrecision, load
from neural_mp.adaptors.pytorch import adaptor as pytorch
from neural_mp.adaptors.pytorch.converted_module import CompiledModule, explain_missing_compiler
from neural_mp.errors import ConfigurationError


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, ...]]:
    """Shapes of the calls of compiled graphs, which nothing compiles."""
    shapes: list[tuple[int, ...]] = []

    def uncompiled(module: nn.Module) -> nn.Module:
        module.register_forward_pre_hook(lambda _, args: shapes.append(tuple(args[0].shape)))
        return module

    monkeypatch.setattr(torch, "compile", uncompiled)
    return shapes


def converter(net, digits, **options):
    images = torch.from_numpy(digits[0].images[:64])
    return MixedPrecision(
        model=net,
        runtime="torch.compile",
        precisions="int8",
        calib_dataloader=[images],
        cache=False,
        **options,
    )


@pytest.mark.slow
@pytest.mark.skipif(bool(explain_missing_compiler()), reason="no C++ compiler")
def test_a_compiled_result_is_verified_timed_saved_and_loaded_compiled(
    net, digits, calls, tmp_path
):
    result = converter(net, digits, exclude="head")()
    assert result.framework == "pytorch"
    assert result.plan["head"].precision == "fp32"
    assert set(result.plan.counts()) == {"int8", "fp32"}
    assert isinstance(result.model, CompiledModule)
    assert {shape[0] for shape in calls} >= {1, 3, 64}
    assert any("C++ compiler" in warning for warning in result.report.warnings)
    images = torch.from_numpy(digits[1].images[:16])
    result.save(tmp_path / "saved")
    previous = len(calls)
    served = load(tmp_path / "saved")
    assert isinstance(served.model, CompiledModule)
    assert torch.equal(served(images), result(images))
    assert len(calls) > previous


@pytest.mark.slow
def test_without_a_compiler_the_runtime_is_refused_with_the_reason(net, digits, monkeypatch):
    part = pytorch.PyTorchAdaptor.compiler
    changed = type(part)(part.compile, part.runtime, lambda: "no compiler here", part.compiling)
    monkeypatch.setattr(pytorch.PyTorchAdaptor, "compiler", changed)
    with pytest.raises(ConfigurationError, match="'torch.compile': .*no compiler here"):
        converter(net, digits)()


def test_a_compiler_that_does_not_exist_is_missing():
    from torch._inductor import config

    # Undone by pytest, the setting would be deleted for all tests that follow.
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        assert "requires a C++ compiler" in explain_missing_compiler()
    assert config.cpp.cxx
