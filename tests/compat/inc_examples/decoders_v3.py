"""Language models of version 3.9: a small decoder, a tokenizer of words and texts, made here."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from inc_examples.case import V3, Case, Step

_LANGUAGE = "examples/pytorch/nlp/huggingface_models/language-modeling/quantization"
_TEXT = "once upon a time there was little girl who liked to go places and meet new people"
_WORDS = _TEXT.split(" ")
_SPEED = (r"Batch size = \d+", r"Latency: [\d.]+ ms", r"Throughput: [\d.]+ \w+/sec")


def decoder(folder: Path) -> None:
    """Write a decoder with random weights, its tokenizer, and texts."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import GPTJConfig, GPTJForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    vocabulary = {token: number for number, token in enumerate(["<pad>", "<unk>", "</s>", *_WORDS])}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_level, pad_token="<pad>", unk_token="<unk>", eos_token="</s>"
    )
    tokenizer.save_pretrained(folder / "net")
    # Of this class, transformers 5 can return tuples, as a script asks.
    config = GPTJConfig(
        vocab_size=len(vocabulary),
        n_embd=128,
        n_layer=2,
        n_head=4,
        n_positions=1024,
        rotary_dim=16,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=2,
    )
    GPTJForCausalLM(config).save_pretrained(folder / "net")
    rng = np.random.default_rng(0)
    (folder / "texts").mkdir()
    lines = (json.dumps({"text": " ".join(rng.choice(_WORDS, 64))}) for _ in range(32))
    (folder / "texts" / "train.jsonl").write_text("\n".join(lines), encoding="utf-8")
    (folder / "texts.txt").write_text(" ".join(rng.choice(_WORDS, 2048)), encoding="utf-8")


def _exported() -> Case:
    common = ("--model", "net", "--output_dir", "saved", "--iters", "8")
    return Case(
        f"{_LANGUAGE}/static_quant/pt2e",
        decoder,
        {
            "tune": Step((*common, "--quantize")),
            "performance": Step((*common, "--performance"), _SPEED),
        },
        script="run_clm_no_trainer.py",
        result="saved",
        tag=V3,
    )


def _generation() -> Case:
    common = ("--model", "net", "--dataset", "texts.txt", "--woq", "--group_size", "32")
    sizes = ("--seq_len", "64", "--n_samples", "8", "--output_dir", "saved")
    speed = ("--benchmark", "--benchmark_iters", "2", "--num_warmup", "1", "--max_new_tokens", "4")
    lines = (r"Inference latency: [\d.]+ sec", r"Throughput: [\d.]+ samples/sec")
    steps = {
        name: Step((*common, *sizes, *speed, "--woq_algo", name), lines)
        for name in ("Rtn", "Awq", "Teq", "GPTQ")
    }
    return Case(
        f"{_LANGUAGE}/transformers/weight_only/text-generation",
        decoder,
        steps,
        script="run_generation_cpu_woq.py",
        result="saved",
        tag=V3,
    )


CASES: tuple[Case, ...] = (_exported(), _generation())
