"""Model folders of `transformers`, tiny and trained in seconds, with data files of their tasks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
GOOD = ["good", "fine", "great", "nice"]
BAD = ["bad", "poor", "awful", "dull"]
PEOPLE = ["anna", "bert", "carl", "dora"]
REST = [f"w{number}" for number in range(48)]
WORDS = [*SPECIAL, *GOOD, *BAD, *PEOPLE, *REST]
SIZES: dict[str, Any] = {
    "vocab_size": len(WORDS),
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
}
STEPS = 60


def write_rows(file: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return file


def make_tokenizer() -> Any:
    backend = Tokenizer(WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = Whitespace()
    backend.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", model_max_length=64
    )


def train(model: Any, loss_of_batch: Callable[[np.random.Generator], torch.Tensor]) -> Any:
    """Minimize a loss on new random batches."""
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    random = np.random.default_rng(1)
    model.train()
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of_batch(random).backward()
        optimizer.step()
    return model.eval()


def save(folder: Path, model: Any, processor: Any) -> Path:
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def sentence(random: np.random.Generator, kind: str | None = None) -> str:
    words = list(random.choice(REST, random.integers(3, 12)))
    if kind is not None:
        words.insert(
            int(random.integers(len(words))), str(random.choice(GOOD if kind == "good" else BAD))
        )
    return " ".join(words)


def opinions(random: np.random.Generator, count: int) -> list[dict[str, Any]]:
    kinds = random.choice(["bad", "good"], count)
    return [{"text": sentence(random, kind), "label": str(kind)} for kind in kinds]


def text_classifier(folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = make_tokenizer()
    config = transformers.BertConfig(
        **SIZES, id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1}
    )
    model = transformers.BertForSequenceClassification(config)

    def loss(random: np.random.Generator) -> torch.Tensor:
        rows = opinions(random, 32)
        encoded = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)
        labels = torch.tensor([int(row["label"] == "good") for row in rows])
        return model(**encoded, labels=labels).loss

    return save(folder, train(model, loss), tokenizer)
