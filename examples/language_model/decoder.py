"""A small Llama decoder of Python source, trained on the standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

OUT = Path(__file__).parent / "out"
MODEL = OUT / "decoder"
TRAINING_TEXT, UNSEEN_TEXT = OUT / "training.txt", OUT / "unseen.txt"
WORDS = 1024
CONTEXT = 128


def texts() -> tuple[str, str]:
    """Source of the standard library, as text to train with and text for the evaluation."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(library.glob("*.py")) + sorted(library.glob("asyncio/*.py"))
    sources = [file.read_text("utf-8", "ignore") for file in files]
    return "".join(sources[::2]), "".join(sources[1::8])


def tokenizer(text: str) -> PreTrainedTokenizerFast:
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator([text], vocab_size=WORDS, special_tokens=["<end>"])
    return PreTrainedTokenizerFast(tokenizer_object=bpe._tokenizer, eos_token="<end>")


def train(steps: int = 600, batch: int = 16) -> Path:
    """Write the folder of a trained decoder with its tokenizer, and the texts; once."""
    if MODEL.exists():
        return MODEL
    OUT.mkdir(exist_ok=True)
    training_text, unseen = texts()
    TRAINING_TEXT.write_text(training_text[:400_000], "utf-8")
    UNSEEN_TEXT.write_text(unseen[:60_000], "utf-8")
    encoder = tokenizer(training_text)
    ids = torch.tensor(encoder(training_text)["input_ids"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=0,
        eos_token_id=0,
    )
    decoder = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(decoder.parameters(), 2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, steps)
    for step in range(steps):
        starts = torch.randint(len(ids) - CONTEXT, (batch,))
        windows = torch.stack([ids[start : start + CONTEXT] for start in starts])
        loss = decoder(windows, labels=windows).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    decoder.eval().save_pretrained(MODEL)
    encoder.save_pretrained(MODEL)
    return MODEL
