"""Figures of a first day: hostile twins, AutoScheme, the key-value cache, INT8 by token."""

from __future__ import annotations

import copy
import json
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from benchmarks.decoders import source_decoder as decoder
from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings, Subject, change, perplexity
from benchmarks.decoders.weights import HELD, MISSED, REFUSED, TOLERANCE, tuned
from benchmarks.measurement.children import child_command
from benchmarks.peers.decoder_peers import run_peer
from benchmarks.peers.inc3_networks import CONTEXT
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.graph.int8_cache import count_cache_bytes, make_int8_cache
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec

TWIN_HEADINGS = ("seed", "text", "bytes", "over plain", "unseen", "evaluations", "verdict")
SCHEME_HEADINGS = ("architecture", "tool", "bytes", "unseen text", "CPU s")
CACHE_HEADINGS = ("type of the model", "bytes over BF16", "decode over its float cache")
ROW_HEADINGS = ("tool", "error of logits, a token with outliers in the batch")
#: Tokens in the cache where decoding is timed.
_CACHED = 2048
_ITERATIONS = 200


def twins_of(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield the plans of a decoder and its hostile twin in 4 and 8 bits, for several texts."""
    count = subject.settings.tuning_texts
    ratios, evaluations, verdicts = [], [], []
    for index in range(count):
        text, sizes = subject.tuning_part(index, count), {}
        for name, net in subject.nets.items():
            with tempfile.TemporaryDirectory() as folder:
                result = tuned(net, subject.calibration, text, folder, precisions="int4,int8")
            base, unseen = (perplexity(model, subject.unseen) for model in (net, result))
            sizes[name] = result.adaptor.weight_bytes(result.held)
            ratio = sizes[name] / sizes["plain"]
            outcome = HELD if unseen <= base * (1 + TOLERANCE) else MISSED
            verdict = outcome if result.met else REFUSED
            if name != "plain":
                ratios.append(ratio)
                evaluations.append(len(result.trials))
                verdicts.append(verdict)
            cells = (f"{subject.seed}, {name}", f"part {index + 1}", str(sizes[name]))
            cells += (f"{ratio:.3f}", change(unseen, base), str(len(result.trials)), verdict)
            yield Detail(TWIN_HEADINGS, cells)
    yield Figure(Goal.TWIN_BYTES, f"{max(ratios):.3f}")
    yield Figure(Goal.TWIN_MISSES, f"{verdicts.count(MISSED)} of {len(verdicts)}")
    yield Figure(Goal.TWIN_EVALUATIONS, str(max(evaluations)))


def _architectures() -> dict[str, nn.Module]:
    """Return untrained decoders of bytes of several architectures, about equally large."""
    common: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 192,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 6,
        "max_position_embeddings": CONTEXT,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 0,
    }
    keys: dict[str, Any] = {"num_key_value_heads": 6, "head_dim": 32}
    neo = transformers.GPTNeoXConfig(**common)
    return {
        "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**common, **keys)),
        "Qwen3": transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, **keys)),
        "Phi-3": transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**common, num_key_value_heads=6)
        ),
        "GPT-NeoX": transformers.GPTNeoXForCausalLM(neo),
    }


def auto_scheme_of(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield bytes at +1 % on unseen text of decoders of several architectures, and AutoScheme's.

    The peer gets the numbers of mean bits one by one; its seconds are those of the smallest result
    that holds on unseen text, which it does not evaluate.
    """
    settings = subject.settings
    train, _, _ = decoder.texts()
    torch.manual_seed(subject.seed)
    nets = _architectures()
    if settings.steps < len(nets):
        nets = dict(list(nets.items())[:1])
    for name, net in nets.items():
        net = decoder.train(net, train, settings.steps)
        base = perplexity(net, subject.unseen)
        with tempfile.TemporaryDirectory() as folder:
            started = sum(os.times()[:4])
            result = tuned(net, subject.calibration, subject.tuning, folder, precisions="int4,int8")
            seconds = sum(os.times()[:4]) - started
        size = result.adaptor.weight_bytes(result.held)
        unseen = change(perplexity(result, subject.unseen), base)
        yield Detail(SCHEME_HEADINGS, (name, "neural-mp", str(size), unseen, f"{seconds:.0f}"))
        rows = list(_run_auto_scheme(subject, net, train))
        for row in rows:
            label = f"AutoScheme, {row['bits']} bits"
            cells = (f"{row['bytes']:.0f}", f"{row['unseen'] * 100:+.2f} %", f"{row['cpu']:.0f}")
            yield Detail(SCHEME_HEADINGS, (name, label, *cells))
        holding = [row for row in rows if row["unseen"] <= TOLERANCE]
        if holding:
            best = min(holding, key=lambda row: float(row["bytes"]))
            value = f"{size / best['bytes']:.2f} / {seconds / best['cpu']:.2f}"
            yield Figure(Goal.AUTO_SCHEME, value)


def _run_auto_scheme(subject: Subject, net: Any, train: np.ndarray) -> Iterator[dict[str, Any]]:
    peer = subject.settings.auto_round
    if peer is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        net.save_pretrained(folder)
        text, tokens = Path(folder) / "text.json", Path(folder) / "tokens.npz"
        rows = np.array_split(train[: 512 * 8 * CONTEXT], 512)
        lines = [{"text": bytes(row.astype(np.uint8)).decode("latin-1")} for row in rows]
        text.write_text(json.dumps(lines), encoding="utf-8")
        np.savez(tokens, allow_pickle=False, unseen=torch.cat([b for _, b in subject.unseen]))
        steps = min(_ITERATIONS, subject.settings.rounding_steps)
        yield from run_peer(
            child_command("peers.auto_scheme", folder, text, tokens, steps, python=peer)
        )


def cache_of(subject: Subject) -> Iterator[Detail | Figure]:
    """Yield perplexity, bytes and decode seconds of an INT8 key-value cache."""
    int8 = OpConfig(Precision.INT8, QuantSpec.parse("int8 symmetric per_channel"))
    plan = PrecisionPlan({"lm_head": int8})
    inputs, values = subject.tuning[0][0], []
    for kv_cache in ("float", "int8"):
        result = convert_with_plan(
            subject.plain, plan, inputs=inputs, capture="layers", kv_cache=kv_cache
        )
        values.append(perplexity(result.model, subject.unseen))
    figures = [change(values[1], values[0])]
    times = list(_time_decoding(subject.settings))
    for dtype, size, over in times:
        yield Detail(CACHE_HEADINGS, (dtype, f"{size:.3f}", f"{over:.2f}"))
    figures += [f"{times[0][1]:.3f}", f"{times[0][2]:.2f} ({times[0][0]})"]
    yield Figure(Goal.CACHE, " / ".join(figures))


def _time_decoding(settings: Settings) -> Iterator[tuple[str, float, float]]:
    """Yield a type, bytes of the cache over BF16, and time of a step over the float cache."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=settings.layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=2 * _CACHED,
    )
    net = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(256, (1, _CACHED))
    for dtype in (torch.float32, torch.bfloat16):
        model = copy.deepcopy(net).to(dtype)
        caches = [transformers.DynamicCache(config=config), make_int8_cache(config)]
        seconds: list[list[float]] = [[], []]
        with torch.inference_mode():
            for cache in caches:
                model(input_ids=tokens[:, :-1], past_key_values=cache)
            for _ in range(settings.rounds):
                for cache, spent in zip(caches, seconds, strict=True):
                    started = time.process_time()
                    model(input_ids=tokens[:, -1:], past_key_values=cache)
                    spent.append(time.process_time() - started)
        plain, small = map(count_cache_bytes, caches)
        over = median(b / a for a, b in zip(*seconds, strict=True))
        yield str(dtype).removeprefix("torch."), small / (plain * 2 / dtype.itemsize), over


def rows_of(settings: Settings) -> Iterator[Detail | Figure]:
    """Yield errors of dynamic INT8 beside a token with outliers, ours and torchao's."""
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    import neural_mp
    import neural_mp.compat.torchao as ours

    config = transformers.LlamaConfig(
        vocab_size=160,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    errors: dict[str, list[float]] = {"neural-mp": [], "torchao": []}
    for seed in range(settings.tuning_texts):
        torch.manual_seed(seed)
        net = transformers.LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.ndim == 2:
                    parameter.normal_(0, parameter.shape[1] ** -0.5)
            net.model.embed_tokens.weight[5] *= 60
            ids = torch.randint(6, 150, (4, 24))
            ids[1:, 0] = 5
            right = net(ids).logits
            for name, change_model, kind in (
                ("neural-mp", neural_mp.quantize_, ours.Int8DynamicActivationInt8WeightConfig),
                ("torchao", quantize_, Int8DynamicActivationInt8WeightConfig),
            ):
                converted = copy.deepcopy(net)
                change_model(converted, kind())
                error = converted(ids).logits - right
                errors[name].append(float(error.norm() / right.norm()))
    for name, values in errors.items():
        yield Detail(ROW_HEADINGS, (name, " / ".join(f"{value:.4f}" for value in values)))
    yield Figure(Goal.ROWS, f"{_mean_ratio(errors):.3f}")


def _mean_ratio(errors: Mapping[str, Sequence[float]]) -> float:
    return sum(errors["neural-mp"]) / sum(errors["torchao"])
