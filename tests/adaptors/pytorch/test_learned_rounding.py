"""Learned rounding of decoder blocks: less error than by nearest, repeatable, resumable."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights, CorrectionOptions
from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.decoders import decoder_blocks, learned_blocks
from neural_mp.core.enums import Capture
from neural_mp.core.precision import make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.util.system.watched_thread import TimeLimit

ADAPTOR = PyTorchAdaptor()
STEPS = 30


def decoder(layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=128, num_hidden_layers=layers, **sizes)
    return LlamaForCausalLM(config).eval()


def samples() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(128, (4, 16), generator=draw)} for _ in range(4)]


@pytest.fixture(scope="module")
def model():
    return ADAPTOR.load(decoder(), example=samples()[0], capture=Capture.LAYERS)


def _plan(model, method: str, bits: int = 4) -> PrecisionPlan:
    spec = make_weight_only(QuantSpec.parse(f"uint{bits} asymmetric per_group 64 {method}"))
    dense = (op for op in ADAPTOR.grouped_weights.weights(model) if "embed" not in op)
    return PrecisionPlan(dict.fromkeys(dense, spec))


def _made(model, method="autoround", bits=4, seed=0, folder=None):
    options = CorrectionOptions(LearnOptions(STEPS, seed), folder)
    corrected = CorrectedWeights(ADAPTOR, model, lambda: iter(samples()), options)
    return corrected.of_plan(_plan(model, method, bits))


def _rounded(weights) -> nn.Module:
    net = decoder()
    for op, weight in weights.items():
        net.get_submodule(op).weight.data.copy_(torch.from_numpy(weight.to_floats()))
    return net


def _block_error(net: nn.Module) -> float:
    """The squared error of the results of the first block, which reads exact inputs."""
    exact, total = decoder(), 0.0
    results: list[torch.Tensor] = []
    for network in (exact, net):
        network.model.layers[0].register_forward_hook(lambda _, args, y: results.append(y))
    for inputs in samples():
        with torch.no_grad():
            exact(**inputs), net(**inputs)
        total += float((results[-1] - results[-2]).square().sum())
    return total


@pytest.mark.slow
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_results_of_a_block_are_closer_than_with_weights_rounded_to_nearest(model, bits):
    learned = _made(model, bits=bits)
    spec = QuantSpec.parse(f"uint{bits} asymmetric per_group 64")
    weights = ADAPTOR.grouped_weights.weights(model)
    nearest = {op: Quantizer(spec).round_to_nearest(weights[op]) for op in learned}
    assert _block_error(_rounded(learned)) < 0.9 * _block_error(_rounded(nearest))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["awq", "gptq", "awq gptq"])
def test_learning_improves_on_the_corrections_it_starts_from(model, words):
    learned, start = _made(model, f"{words} autoround", 3), _made(model, words, 3)
    assert _block_error(_rounded(learned)) < 0.95 * _block_error(_rounded(start))
    for op, weight in learned.items():
        assert (weight.input_factors is None) == (start[op].input_factors is None)


def _assert_equal(first, second) -> None:
    assert first.keys() == second.keys()
    for op, weight in first.items():
        np.testing.assert_array_equal(weight.codes, second[op].codes)
        np.testing.assert_array_equal(weight.scales, second[op].scales)
        np.testing.assert_array_equal(weight.offsets, second[op].offsets)


@pytest.mark.slow
def test_a_seed_repeats_its_result_and_another_seed_does_not(model):
    first = _made(model)
    _assert_equal(first, _made(model))
    second = _made(model, seed=1)
    assert any((first[op].codes != second[op].codes).any() for op in first)


@pytest.mark.slow
def test_a_run_that_was_killed_continues_after_its_last_block(model, tmp_path, monkeypatch):
    code = f"""
import os, signal, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_learned_rounding as t
from pathlib import Path
from neural_mp.adaptors.common.weights.weight_store import WeightStore

kept = WeightStore.store_weights

def put_and_die(*args):
    kept(*args)
    os.kill(os.getpid(), signal.SIGKILL)

WeightStore.store_weights = put_and_die
model = t.ADAPTOR.load(t.decoder(), example=t.samples()[0], capture=t.Capture.LAYERS)
t._made(model, folder=Path({str(tmp_path)!r}))
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ))
    assert killed.returncode == -signal.SIGKILL
    (file,) = tmp_path.glob("*.npz")
    learned: list[int] = []
    learn = learned_blocks._Student.learn_weights

    def counted(self, learning, *args):
        learned.append(len(learning))
        return learn(self, learning, *args)

    monkeypatch.setattr(learned_blocks._Student, "learn_weights", counted)
    resumed = _made(model, folder=tmp_path)
    assert len(learned) == 1, "the first block is taken from its file"
    _assert_equal(resumed, _made(model))
    # A damaged file costs time only.
    file.write_bytes(file.read_bytes()[:-100])
    _assert_equal(resumed, _made(model, folder=tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("words", ["gptq", "awq gptq"])
def test_corrections_by_calibration_continue_after_the_last_block(
    model, words, tmp_path, monkeypatch
):
    whole = _made(model, words)
    first = next(iter(whole))
    _made(model, words, folder=tmp_path)
    files = sorted(tmp_path.glob("*.npz"), key=lambda file: file.stat().st_mtime)
    for file in files[1:]:
        file.unlink()
    paths: list[str] = []
    observe = decoder_blocks.moments_of_layers

    def noted(module, block, *args):
        paths.append(block.path)
        return observe(module, block, *args)

    monkeypatch.setattr(decoder_blocks, "moments_of_layers", noted)
    resumed = _made(model, words, folder=tmp_path)
    assert paths == ["model.layers.1"], first
    _assert_equal(resumed, whole)


def test_moments_block_by_block_are_those_of_the_whole_model(model):
    ops = [op for op in ADAPTOR.grouped_weights.weights(model) if "layers" in op]
    whole = decoder_blocks.collect_input_moments(model, samples(), ops)
    blockwise = {}
    for moments in decoder_blocks.iterate_block_moments(
        model, lambda: iter(samples()), ops, lambda _: False
    ):
        blockwise |= moments
    assert blockwise.keys() == whole.keys()
    for op, moments in blockwise.items():
        np.testing.assert_allclose(moments.products, whole[op].products, rtol=0, atol=1e-4)
        np.testing.assert_allclose(moments.magnitudes, whole[op].magnitudes, rtol=1e-4)


@pytest.mark.slow
def test_a_plan_names_learned_rounding_and_a_result_repeats_it(model, tmp_path):
    plan = _plan(model, "autoround")
    spec = plan["lm_head"].weight
    assert str(spec) == "uint4 asymmetric per_group 64 minmax autoround"
    result = convert_with_plan(
        decoder(),
        plan,
        inputs=samples()[0],
        calibration=samples(),
        capture=Capture.LAYERS,
        rounding_steps=STEPS,
        workspace=tmp_path,
    )
    expected = _rounded(_made(model))
    x = samples()[0]["input_ids"]
    with torch.no_grad():
        exact = decoder()(x).logits
        difference = result.model(x).logits - expected(x).logits
    assert difference.norm() < 0.02 * exact.norm()


def test_layers_outside_of_blocks_are_learned_for_their_own_results():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32)).eval()
    batches = [torch.randn(16, 64) * torch.linspace(0.1, 3, 64) for _ in range(4)]
    spec = QuantSpec.parse("uint3 asymmetric per_group 32")

    def error(method: str) -> float:
        plan = {"0": make_weight_only(QuantSpec.parse(f"{spec} {method}"))}
        result = convert_with_plan(
            copy.deepcopy(net), PrecisionPlan(plan), inputs=batches[0], calibration=batches
        )
        with torch.no_grad():
            return sum(float((result(x) - net(x)).square().sum()) for x in batches)

    assert error("autoround") < 0.8 * error("rtn")


@pytest.mark.slow
def test_experts_of_a_block_are_learned_with_it():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_key_value_heads": 4, "num_hidden_layers": 1}
    net = MixtralForCausalLM(MixtralConfig(vocab_size=128, **sizes, **experts)).eval()
    x = samples()[0]
    with torch.no_grad():
        exact = net(**x).logits
    loaded = ADAPTOR.load(net, example=x, capture=Capture.LAYERS)
    weights = ADAPTOR.grouped_weights.weights(loaded)
    dense = [op for op in weights if "embed" not in op and weights[op].shape[0] % 16 == 0]
    assert sum("experts" in op for op in dense) == 2 * 4

    def error(method: str) -> float:
        spec = make_weight_only(QuantSpec.parse(f"uint4 asymmetric per_group 64 {method}"))
        result = convert_with_plan(
            net,
            PrecisionPlan(dict.fromkeys(dense, spec)),
            inputs=x,
            calibration=samples(),
            capture=Capture.LAYERS,
            rounding_steps=STEPS,
        )
        return float((result.model(**x).logits - exact).square().sum())

    assert error("autoround") < 0.9 * error("rtn")


def test_learned_rounding_excludes_hqq():
    with pytest.raises(PlanError, match="hqq excludes other corrections"):
        QuantSpec.parse("uint4 asymmetric per_group 64 hqq autoround")


@pytest.mark.slow
def test_a_time_limit_ends_learning_and_other_blocks_are_corrected_alone(model, monkeypatch):
    """The limit passes in the first block."""
    whole, calls = _made(model, "awq autoround", 3), []

    def ends(limit: TimeLimit) -> bool:
        calls.append(limit)
        return len(calls) > 5

    monkeypatch.setattr(TimeLimit, "is_reached", ends)
    learned, start = _made(model, "awq autoround", 3), _made(model, "awq", 3)
    assert learned.keys() == whole.keys() == start.keys()
    assert _block_error(_rounded(learned)) <= _block_error(_rounded(start))
    differ = [op for op in learned if not np.array_equal(learned[op].codes, start[op].codes)]
    assert not any("layers.1" in op for op in differ)
