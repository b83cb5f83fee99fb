"""A small BERT that tells from a docstring of Python's standard library what it is about."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from transformers import BatchEncoding, BertConfig, BertForSequenceClassification

WEIGHTS = Path(__file__).parent / "out" / "weights.pt"
#: Topic → files and folders of the standard library.
TOPICS = {
    "network": "http urllib email ftplib.py smtplib.py imaplib.py socketserver.py xmlrpc ssl.py",
    "concurrency": "asyncio multiprocessing threading.py concurrent queue.py sched.py",
    "testing": "unittest doctest.py pdb.py bdb.py trace.py",
    "numbers and data": "_pydecimal.py fractions.py statistics.py random.py json csv.py "
    "_pydatetime.py datetime.py calendar.py collections heapq.py",
}
LONGEST = 32
PADDING, UNKNOWN = 0, 1


def docstrings() -> list[tuple[str, int]]:
    """All docstrings of the topics, each with the number of its topic; no module is imported."""
    library = Path(sysconfig.get_path("stdlib"))
    topics = {}
    for topic, names in enumerate(TOPICS.values()):
        for name in names.split():
            path = library / name
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                if file.exists() and "/test" not in file.as_posix().removeprefix(str(library)):
                    topics.update(dict.fromkeys(_in_file(file), topic))
    return sorted(topics.items())


def _in_file(file: Path) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = (n for n in ast.walk(ast.parse(file.read_text("utf-8"))) if isinstance(n, kinds))
    texts = (ast.get_docstring(node) or "" for node in nodes)
    return [text for text in texts if len(text.split()) >= 5]


def words(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())[:LONGEST]


class Collator:
    """Texts with their topics → one dict for a batch, the labels in it, as collators give it."""

    def __init__(self, texts: list[str], size: int = 2000) -> None:
        counted = Counter(token for text in texts for token in words(text))
        self.number = {token: n for n, (token, _) in enumerate(counted.most_common(size), start=2)}
        self.size = size + 2

    def __call__(self, samples: list[tuple[str, int]]) -> BatchEncoding:
        rows = [[self.number.get(w, UNKNOWN) for w in words(text)] for text, _ in samples]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [PADDING] * (longest - len(row)) for row in rows])
        labels = torch.tensor([topic for _, topic in samples])
        mask = (ids != PADDING).long()
        return BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": labels})


class Docstrings:
    """Loaders for training and for testing."""

    def __init__(self) -> None:
        samples = docstrings()
        random.Random(0).shuffle(samples)
        count = len(samples) // 4
        self.collate = Collator([text for text, _ in samples[count:]])
        self.train, self.test = (
            torch.utils.data.DataLoader(
                part,
                batch_size=64,
                collate_fn=self.collate,
                shuffle=shuffle,
                generator=torch.Generator().manual_seed(0),
            )
            for part, shuffle in ((samples[count:], True), (samples[:count], False))
        )


def trained(data: Docstrings, epochs: int = 6) -> BertForSequenceClassification:
    """The model, trained the first time it is asked for."""
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=data.collate.size,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=256,
            max_position_embeddings=LONGEST,
            num_labels=len(TOPICS),
        )
    )
    if not WEIGHTS.exists():
        print("training a small BERT on docstrings (about ten seconds) …")
        _train(model, data, epochs)
        WEIGHTS.parent.mkdir(exist_ok=True)
        torch.save(model.state_dict(), WEIGHTS)
    model.load_state_dict(torch.load(WEIGHTS, weights_only=True))
    return model.eval()


def _train(model: BertForSequenceClassification, data: Docstrings, epochs: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1e-3, total_steps=epochs * len(data.train)
    )
    model.train()
    for _ in range(epochs):
        for batch in data.train:
            loss = model(**batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
