"""AutoRound's AutoScheme on a decoder of bytes.

    PEER/bin/python -m benchmarks.peers.auto_scheme FOLDER TEXT.json TOKENS.npz ITERATIONS

Runs in an environment of its own (auto-round), without neural-mp, and prints a line of JSON per
number of mean bits: bytes of all weights, change of the perplexity on unseen text, CPU seconds.
Weights that stay are counted in 16 bits, as AutoRound writes them.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

_GROUP = 64
_MEAN_BITS = (4.5, 5.0, 6.0, 7.0)
#: Bytes of the parameters of a group: a scale in 16 bits, and a zero point of as many bits.
_SCALE_BYTES = 2


def perplexity(model: nn.Module, windows: torch.Tensor) -> float:
    """Return the perplexity of windows of tokens."""
    total, count = 0.0, 0
    with torch.no_grad():
        for ids in windows.split(8):
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            losses = nn.functional.cross_entropy(
                logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
            )
            total, count = total + float(losses), count + ids[:, 1:].numel()
    return math.exp(total / count)


def tokenizer_of_bytes() -> object:
    """Return a tokenizer whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary = {letter: byte for byte, letter in bytes_to_unicode().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=1 << 20)


def _count_bytes(model: nn.Module, layers: dict[str, dict[str, int]]) -> float:
    quantized = {name: entry for name, entry in layers.items() if entry.get("bits", 16) < 16}
    total = 0.0
    for name, parameter in model.named_parameters():
        layer = quantized.get(name.removesuffix(".weight"))
        if layer is None:
            total += 2 * parameter.numel()
            continue
        bits, groups = layer["bits"], parameter.numel() / _GROUP
        total += parameter.numel() * bits / 8 + groups * (_SCALE_BYTES + bits / 8)
    return total


def plans(folder: str, text: str, tokens: str, iterations: str) -> Iterator[dict[str, float]]:
    """Yield figures of several mean numbers of bits, the smallest first."""
    from auto_round import AutoRound, AutoScheme
    from transformers import AutoModelForCausalLM

    unseen = torch.from_numpy(np.load(tokens)["unseen"])
    base = perplexity(AutoModelForCausalLM.from_pretrained(folder).eval(), unseen)
    for bits in _MEAN_BITS:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        started = sum(os.times()[:4])
        wall = time.perf_counter()
        scheme = AutoScheme(avg_bits=bits, options=(f"W4A16G{_GROUP}", f"W8A16G{_GROUP}"))
        rounder = AutoRound(
            model,
            tokenizer_of_bytes(),
            scheme=scheme,
            dataset=text,
            iters=int(iterations),
            nsamples=128,
            seqlen=unseen.shape[1],
            device_map="cpu",
            enable_torch_compile=False,
        )
        rounded, layers = rounder.quantize()
        yield {
            "bits": bits,
            "bytes": _count_bytes(rounded, layers),
            "unseen": perplexity(rounded.float(), unseen) / base - 1,
            "cpu": sum(os.times()[:4]) - started,
            "wall": time.perf_counter() - wall,
        }


def main() -> None:
    for row in plans(*sys.argv[1:]):
        print("\n" + json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
