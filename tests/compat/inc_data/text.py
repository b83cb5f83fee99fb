"""Sentences, questions with answers, tokenizers and lists of labels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

QUESTIONS = 4
_ANIMALS = "the a dog cat sees likes runs to house tree who what does it not green old"
_SENTENCES = ("The dog sees the cat.", "The cat runs to the old tree.", "Who likes the house?")
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
#: Of the models whose tokenizers are word pieces.
_WORD_PIECES = ("bert", "distilbert", "mobilebert")


def sentences(folder: Path) -> Mapping[str, Any]:
    """Pairs of sentences in the form of MRPC, and tokenizers for all models.

    Returns:
        The options with paths; for the tokenizer one for every type of model.
    """
    header = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
    rows = [
        f"{index % 2}\t{index}\t{index + 100}\t{_SENTENCES[index % 3]}\t{_SENTENCES[index // 3]}\n"
        for index in range(9)
    ]
    for part in ("train", "dev"):
        (folder / f"{part}.tsv").write_text(header + "".join(rows))
    tokenizers = {kind: _word_pieces(folder / kind, kind) for kind in _WORD_PIECES}
    return {
        "data_dir": folder,
        "model_name_or_path": {**tokenizers, "roberta": _byte_pairs(folder / "roberta")},
    }


def questions(folder: Path) -> Mapping[str, Any]:
    """Questions in the form of SQuAD 1.1, and a vocabulary."""
    (folder / "dev-v1.1.json").write_text(json.dumps(squad()))
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in _vocabulary()))
    return {"label_file": folder / "dev-v1.1.json", "vocab_file": folder / "vocab.txt"}


def squad() -> dict[str, Any]:
    """Questions with their answers, in the form of SQuAD 1.1."""
    context = " ".join(_SENTENCES[:2])
    entries = [
        {
            "id": f"question{index}",
            "question": "Who sees the cat?",
            "answers": [{"answer_start": 0, "text": "The dog"}],
        }
        for index in range(QUESTIONS)
    ]
    paragraphs = [{"context": context, "qas": entries}]
    return {"version": "1.1", "data": [{"title": "animals", "paragraphs": paragraphs}]}


def label_map(folder: Path) -> Mapping[str, Any]:
    """Names of classes with their numbers."""
    file = folder / "label_map.yaml"
    file.write_text("person: 1\nbicycle: 2\ncar: 3\n")
    return {"anno_path": file}


def _vocabulary() -> list[str]:
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    pieces = [f"##{letter}" for letter in letters]
    return [*_SPECIAL, *dict.fromkeys([*_ANIMALS.split(), *letters, *pieces, ".", "?", ","])]


def _word_pieces(folder: Path, kind: str) -> Path:
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in _vocabulary()))
    (folder / "config.json").write_text(json.dumps({"model_type": kind}))
    return folder


def _byte_pairs(folder: Path) -> Path:
    from tokenizers import ByteLevelBPETokenizer

    folder.mkdir()
    tokenizer = ByteLevelBPETokenizer()
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer.train_from_iterator(_SENTENCES, vocab_size=300, special_tokens=special)
    tokenizer.save_model(str(folder))
    (folder / "config.json").write_text(json.dumps({"model_type": "roberta"}))
    return folder
