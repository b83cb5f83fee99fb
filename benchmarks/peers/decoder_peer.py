"""NNCF's planner on a decoder, and torchao's 4-bit weights on a stack of layers.

    PEER/bin/python -m benchmarks.peers.decoder_peer plans FOLDER TOKENS.npz
    PEER/bin/python -m benchmarks.peers.decoder_peer speed LAYERS ROUNDS

Runs in an environment of its own, without neural-mp, and prints a line of JSON per result.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.decoders import torch_stack

#: Tools of NNCF for PyTorch beside rounding to nearest.
_TOOLS: dict[str, dict[str, bool]] = {
    "nearest": {},
    "awq, scale estimation": {"awq": True, "scale_estimation": True},
}
_GROUP = 64
#: Fractions of weights in 4 bits: the largest within the tolerance is found by halving.
_STEPS = 20
_TOLERANCE = 0.01


class _Logits(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(input_ids=input_ids, use_cache=False).logits
        return logits


def _perplexity(model: nn.Module, windows: Sequence[torch.Tensor]) -> float:
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in windows:
            losses = nn.functional.cross_entropy(
                model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            )
            total, count = total + float(losses), count + ids[:, 1:].numel()
    return math.exp(total / count)


def _bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def plans(folder: str, tokens: str) -> Iterator[dict[str, Any]]:
    """Yield the smallest plan within the tolerance per tool, and the one of 4 bits everywhere."""
    import nncf
    from transformers import LlamaForCausalLM

    texts = np.load(tokens)
    parts = [torch.from_numpy(texts[name]).split(8) for name in ("train", "tune", "unseen")]
    calibration, tuning, unseen = parts

    def fresh() -> nn.Module:
        return _Logits(LlamaForCausalLM.from_pretrained(folder)).eval()

    net = fresh()
    whole, tuning_base, unseen_base = (
        _bytes(net),
        _perplexity(net, tuning),
        _perplexity(net, unseen),
    )

    def compressed(step: int, tools: dict[str, bool]) -> nn.Module:
        if step == 0:
            mode = nncf.CompressWeightsMode.INT8_ASYM
            return nncf.compress_weights(fresh(), mode=mode, dataset=nncf.Dataset(calibration))
        return nncf.compress_weights(
            fresh(),
            mode=nncf.CompressWeightsMode.INT4_ASYM,
            ratio=step / _STEPS,
            group_size=_GROUP,
            all_layers=True,
            dataset=nncf.Dataset(calibration),
            sensitivity_metric=nncf.SensitivityMetric.MAX_ACTIVATION_VARIANCE,
            **tools,
        )

    bytes_of_8_bits = _bytes(compressed(0, {}))
    for label, tools in _TOOLS.items():
        models = {_STEPS: compressed(_STEPS, tools)}
        losses = {step: _perplexity(model, tuning) for step, model in models.items()}
        low, high = 0, _STEPS + (losses[_STEPS] <= tuning_base * (1 + _TOLERANCE))
        while high - low > 1:
            middle = min((low + high) // 2, _STEPS)
            models[middle] = models.get(middle) or compressed(middle, tools)
            losses[middle] = _perplexity(models[middle], tuning)
            is_met = losses[middle] <= tuning_base * (1 + _TOLERANCE)
            low, high = (middle, high) if is_met else (low, middle)
        models[low] = models.get(low) or compressed(low, tools)
        for step in dict.fromkeys((low, _STEPS)):
            yield {
                "words": f"NNCF, {label}, {step / _STEPS:.0%} in 4 bits",
                "uniform": step == _STEPS,
                "smallest": step == low,
                "bytes": _bytes(models[step]) / whole,
                "over 8 bits": _bytes(models[step]) / bytes_of_8_bits,
                "tuning": _perplexity(models[step], tuning) / tuning_base - 1,
                "unseen": _perplexity(models[step], unseen) / unseen_base - 1,
                "evaluations": len(losses),
            }


def speed(layers: str, rounds: str) -> Iterator[dict[str, Any]]:
    """Yield ratios of torchao's 4-bit weights over FP32 and BF16, by rows."""
    from torchao.prototype.quantization.int4 import inference_workflow as int4
    from torchao.quantization import quantize_

    with torch.no_grad():
        net = torch_stack.stack(int(layers)).eval()
        half = torch_stack.stack(int(layers)).eval().bfloat16()
        few = torch_stack.stack(int(layers)).eval().bfloat16()
        quantize_(few, int4.PrototypeInt4WeightOnlyConfig(set_inductor_config=False))
        for rows, x in torch_stack.inputs().items():
            low = x.bfloat16()
            calls = [lambda x=x: net(x), lambda x=low: half(x), lambda x=low: few(x)]
            fp32, bf16, bits = torch_stack.cpu_seconds(calls, int(rounds))
            over = {"FP32": torch_stack.ratio(fp32, bits), "BF16": torch_stack.ratio(bf16, bits)}
            yield {"rows": rows, **over}


def main() -> None:
    command, *arguments = sys.argv[1:]
    for row in {"plans": plans, "speed": speed}[command](*arguments):
        print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
