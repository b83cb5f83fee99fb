"""Files of tokenizers with one thing changed, read as the datasets of texts read them."""

from __future__ import annotations

import copy
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attacks.mutants import broken, lines_broken, mutants, places

from neural_mp.data.text import TextDataset

Attacks = Iterator[tuple[str, Callable[[], object]]]

_TEXT = "Red green, blue ünicode red.\n\x00Blue red 😀 green unseen. " * 20
_FILE, _FOLDER = "tokenizer.json", "bert"
#: Files of a folder that `transformers` reads.
_NAMES = ("tokenizer_config.json", "vocab.txt", "config.json", _FILE)
_TASK = "sentence1\tsentence2\tlabel\nred green\tblue\t1\nblue unseen\tred\t0\n"


def prepare(folder: Path) -> None:
    """Train tokenizers of every kind of model, and write a folder of BERT."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
    from tokenizers.trainers import (
        BpeTrainer,
        UnigramTrainer,
        WordLevelTrainer,
        WordPieceTrainer,
    )

    special = ["[UNK]", "[CLS]", "[SEP]", "[PAD]"]
    kinds = {
        "bpe": (models.BPE(unk_token="[UNK]"), BpeTrainer(vocab_size=90, special_tokens=special)),
        "unigram": (
            models.Unigram(),
            UnigramTrainer(vocab_size=60, special_tokens=special, unk_token="[UNK]"),
        ),
        "words": (models.WordLevel(unk_token="[UNK]"), WordLevelTrainer(special_tokens=special)),
        "pieces": (
            models.WordPiece(unk_token="[UNK]"),
            WordPieceTrainer(vocab_size=90, special_tokens=special),
        ),
    }
    for name, (model, trainer) in kinds.items():
        tokenizer = Tokenizer(model)
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), normalizers.Lowercase(), normalizers.Replace("ü", "u")]
        )
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(r"\d+", "isolated"), pre_tokenizers.Whitespace()]
        )
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
        tokenizer.decoder = decoders.WordPiece()
        tokenizer.train_from_iterator([_TEXT], trainer)
        tokenizer.enable_truncation(500)
        tokenizer.save(str(folder / f"{name}.json"))
    _write_folder(folder / _FOLDER)
    (folder / "dev.tsv").write_text(_TASK)
    (folder / "text.txt").write_text(_TEXT)


def _write_folder(folder: Path) -> None:
    from transformers import BertConfig, BertTokenizerFast

    folder.mkdir()
    tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "red", "green", "blue", "##n", ".")
    (folder / "vocab.txt").write_text("\n".join(tokens))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(tokens))
    BertConfig(vocab_size=len(tokens)).save_pretrained(folder)


def attacks(folder: Path, scratch: Path, seed: int, count: int) -> Attacks:
    """Name and call of each attack."""
    sources = sorted(folder.glob("*.json"))
    trees = {
        source: mutants(json.loads(source.read_text()), f"{source.name} {seed}", count)
        for source in [*sources, *(folder / _FOLDER).glob("*.json")]
    }
    drawn = random.Random(f"tokenizers {seed}")
    for number in range(count):
        if number % 3 == 0:
            file = folder / _FOLDER / drawn.choice(_NAMES)
        else:
            file = sources[number % len(sources)]
        if file.suffix == ".json" and drawn.random() < 0.5:
            case, tree = _of_same_type(json.loads(file.read_text()), drawn)
            data = json.dumps(tree).encode()
        elif file in trees and drawn.random() < 0.5:
            case, tree = next(trees[file])
            data = json.dumps(tree).encode()
        elif drawn.random() < 0.5:
            case, text = lines_broken(file.read_text(), drawn)
            data = text.encode()
        else:
            case, data = broken(file.read_bytes(), drawn)
        if file.parent == folder:
            yield f"{file.name}: {case}", _of_text(folder, scratch, data)
        else:
            yield f"folder, {file.name}: {case}", _of_task(folder, scratch, file.name, data)


_NUMBERS = (0, 1, 2, 7, 1000, 2**31 - 1, 2**31, 2**32 - 1)
_TEXTS = ("", " ", "[UNK]", "red", "(r+)+$", ".*", "(?=r)", "\0", "##", "x" * 10_000)


def _of_same_type(tree: Any, drawn: random.Random) -> tuple[str, Any]:
    """Change a number or text to another, or empty a list or dict: the schema still holds."""
    result = copy.deepcopy(tree)
    path = drawn.choice(list(places(result)))
    above = result
    for key in path[:-1]:
        above = above[key]
    value, key = above[path[-1]], path[-1]
    if isinstance(value, bool):
        above[key] = not value
    elif isinstance(value, int):
        above[key] = drawn.choice((*_NUMBERS, value + 1))
    elif isinstance(value, float):
        above[key] = drawn.choice((0.0, -1e308, 1e308, 5.0))
    elif isinstance(value, str):
        above[key] = drawn.choice(_TEXTS)
    elif isinstance(value, dict | list) and value:
        above[key] = type(value)() if drawn.random() < 0.5 else _shortened(value)
    return f"{'.'.join(map(str, path))} of the same type", result


def _shortened(value: Any) -> Any:
    return value[1:] if isinstance(value, list) else dict(list(value.items())[1:])


def _of_text(folder: Path, scratch: Path, data: bytes) -> Callable[[], object]:
    def call() -> None:
        (scratch / _FILE).write_bytes(data)
        dataset = TextDataset(str(folder / "text.txt"), str(scratch), length=8)
        assert dataset[0][0]["input_ids"].shape == (8,)

    return call


def _of_task(folder: Path, scratch: Path, name: str, data: bytes) -> Callable[[], object]:
    from neural_mp.compat.inc.components.text_datasets import glue

    def call() -> None:
        target = scratch / "model"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(folder / _FOLDER, target)
        (target / name).write_bytes(data)
        dataset = glue(str(folder), str(target), max_seq_length=9, task="wnli")
        assert dataset[0][0][0].shape == (9,)

    return call
