"""Texts as windows of tokens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from neural_mp.data import build_dataloader, build_dataset
from neural_mp.data.text import read_context_length
from neural_mp.errors import ConfigurationError, DataError

WORDS = [f"w{number}" for number in range(20)]


@pytest.fixture
def folder(tmp_path):
    """A folder with a tokenizer of twenty words."""
    tokenizer = Tokenizer(WordLevel({token: n for n, token in enumerate(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path


def _text(folder, **options):
    return build_dataset({"text": {"tokenizer": str(folder / "model"), **options}})


def test_windows_follow_each_other_and_the_rest_is_left_out(folder):
    (folder / "a.txt").write_text(" ".join(WORDS))
    windows = _text(folder, path=str(folder / "a.txt"), length=6)
    assert len(windows) == 3
    assert [sample[0]["input_ids"].tolist() for sample in windows] == [
        list(range(start, start + 6)) for start in (0, 6, 12)
    ]
    assert (windows[2][1] == windows[2][0]["input_ids"]).all()


def test_with_a_stride_every_token_counts_once(folder):
    (folder / "a.txt").write_text(" ".join(WORDS))
    windows = _text(folder, path=str(folder / "a.txt"), length=8, stride=4)
    counted = [label for _, labels in windows for label in labels if label != -100]
    assert counted == list(range(20))
    assert windows[1][0]["input_ids"].tolist() == list(range(4, 12))


def test_lines_of_json_and_arrays_of_ids_give_the_same_windows(folder):
    lines = [json.dumps({"body": " ".join(WORDS[:10])}), "", json.dumps({"body": "w10 w11"})]
    (folder / "a.jsonl").write_text("\n".join(lines))
    np.save(folder / "a.npy", np.arange(12, dtype=np.uint16))
    windows = _text(folder, path=str(folder / "a.jsonl"), length=4, key="body")
    ids = build_dataset({"text": {"path": str(folder / "a.npy"), "length": 4}})
    assert len(windows) == len(ids) == 3
    for lhs, rhs in zip(windows, ids, strict=True):
        assert (lhs[0]["input_ids"] == rhs[0]["input_ids"]).all()


TEMPLATE = "{% for m in messages %}{{ bos_token }} {{ m.role }} {{ m.content }} {% endfor %}"


@pytest.fixture
def chat(folder):
    """The tokenizer with words for roles, a first token and a chat template."""
    vocabulary = ["[BOS]", "user", "assistant", *WORDS]
    plain = Tokenizer(WordLevel({token: n for n, token in enumerate(vocabulary)}, unk_token="w0"))
    plain.pre_tokenizer = Whitespace()
    plain.post_processor = TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    saved = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="[BOS]")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder / "chat")
    return folder


def test_conversations_are_written_by_the_chat_template(chat):
    messages = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]
    (chat / "a.jsonl").write_text(json.dumps({"messages": messages}))
    options = {"path": str(chat / "a.jsonl"), "key": "messages", "length": 7}
    ((inputs, _),) = build_dataset({"text": {"tokenizer": str(chat / "chat"), **options}})
    pieces = ["[BOS]", "user", "w1", "w2", "[BOS]", "assistant", "w3"]
    tokens = AutoTokenizer.from_pretrained(chat / "chat").convert_tokens_to_ids(pieces)
    assert inputs["input_ids"].tolist() == tokens


def test_a_folder_without_a_chat_template_and_other_messages_are_errors(chat):
    options = {"path": str(chat / "a.jsonl"), "key": "messages", "length": 4}
    (chat / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "w1"}]}))
    (chat / "chat" / "chat_template.jinja").unlink()
    with pytest.raises(DataError, match="needs the chat template of .* save the tokenizer"):
        build_dataset({"text": {"tokenizer": str(chat / "chat"), **options}})
    (chat / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user"}]}))
    with pytest.raises(DataError, match="line 1, must have under 'messages' a text, or messages"):
        build_dataset({"text": {"tokenizer": str(chat / "chat"), **options}})


def test_the_loader_stacks_windows(folder):
    np.save(folder / "a.npy", np.arange(12))
    spec = {"text": {"path": str(folder / "a.npy"), "length": 4, "max_windows": 2}}
    ((inputs, labels),) = build_dataloader({"batch_size": 8, "dataset": spec})
    assert inputs["input_ids"].shape == labels.shape == (2, 4)


@pytest.mark.parametrize(
    ("file", "content", "options", "kind", "words"),
    [
        ("a.txt", "w1 w2", {}, DataError, "at least one window of 512 tokens, got 2 tokens"),
        ("a.txt", "", {"length": 2}, DataError, "must have tokens, got an empty file"),
        ("a.txt", " \n", {"length": 2}, DataError, "got none for its characters; use another"),
        ("a.jsonl", "\n", {"length": 2}, DataError, "got none for its characters"),
        ("a.jsonl", '{"text": ""}', {"length": 2}, DataError, "got none for its characters"),
        ("a.txt", "w1", {"tokenizer": None}, ConfigurationError, "tokenizer must name a folder"),
        ("a.txt", "w1", {"tokenizer": "."}, DataError, "must contain tokenizer.json"),
        ("a.txt", b"\xff\xfe", {}, DataError, "must be UTF-8"),
        ("a.pdf", "w1", {}, ConfigurationError, "path must end in .txt, .jsonl, .npy"),
        ("a.txt", "w1", {"length": 4, "stride": 5}, ConfigurationError, "stride must be at most"),
        ("a.txt", "w1", {"length": 1}, ConfigurationError, "length"),
        ("a.jsonl", '{"text": 3}', {}, DataError, "line 1, must have under 'text' a text"),
        ("a.jsonl", "{}\n{", {"key": "x"}, DataError, "line 1"),
        ("a.jsonl", "{", {}, DataError, "line 1, cannot be read as JSON"),
    ],
)
def test_a_text_that_cannot_be_used_is_one_error(
    folder, monkeypatch, file, content, options, kind, words
):
    monkeypatch.chdir(folder)
    path = folder / file
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)
    with pytest.raises(kind, match=words):
        _text(folder, path=str(path), **options)


def test_a_tokenizer_with_more_words_than_the_model_does_not_fit(folder):
    (folder / "a.txt").write_text(" ".join(WORDS))
    config = folder / "model" / "config.json"
    config.write_text(json.dumps({"vocab_size": len(WORDS)}))
    assert len(_text(folder, path=str(folder / "a.txt"), length=20)) == 1
    config.write_text(json.dumps({"vocab_size": 12}))
    message = "must fit the model, which has 12 tokens, got token 19; use the tokenizer"
    with pytest.raises(DataError, match=message):
        _text(folder, path=str(folder / "a.txt"), length=20)


_TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "gone", "type_id": 0}}],
    "pair": [],
    "special_tokens": {},
}


@pytest.mark.parametrize(
    "changes",
    [
        {"model": {"type": "WordLevel", "vocab": {"w1": 1}, "unk_token": "gone"}},
        {"post_processor": _TEMPLATE},
        {"model": {"type": "WordLevel"}},
    ],
    ids=["unknown token", "special token", "no vocabulary"],
)
def test_a_tokenizer_that_contradicts_itself_is_one_error(folder, changes):
    """The Rust code of the package panics on some, with an exception that is no `Exception`."""
    file = folder / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    (folder / "a.txt").write_text("w1 w2 w3")
    with pytest.raises(DataError, match=r"the tokenizer .* is damaged: .*; save the tokenizer"):
        _text(folder, path=str(folder / "a.txt"), length=2)


def test_ids_are_whole_numbers_in_one_axis(folder):
    np.save(folder / "a.npy", np.ones((2, 3)))
    with pytest.raises(DataError, match="whole numbers in one axis, got float64"):
        build_dataset({"text": {"path": str(folder / "a.npy"), "length": 2}})


def test_the_context_of_a_model_is_read_from_its_configuration(folder):
    assert read_context_length(folder) is None
    (folder / "config.json").write_text(json.dumps({"n_positions": 64}))
    assert read_context_length(folder) == 64


def test_truncation_and_padding_of_an_earlier_call_are_not_applied(folder):
    (folder / "a.txt").write_text(" ".join(WORDS * 5))
    file = folder / "model" / "tokenizer.json"
    plain = _text(folder, path=str(folder / "a.txt"), length=10)
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.enable_truncation(max_length=30)
    tokenizer.enable_padding(length=300, pad_id=7, pad_token="w7")
    tokenizer.save(str(file))
    again = _text(folder, path=str(folder / "a.txt"), length=10)
    assert len(again) == len(plain) == 10
    for (one, _), (other, _) in zip(plain, again, strict=True):
        assert (one["input_ids"] == other["input_ids"]).all()


def test_tokens_before_a_text_begin_every_window_and_do_not_count(folder):
    file = folder / "model" / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="w0 $A", special_tokens=[("w0", 0)])
    tokenizer.save(str(file))
    (folder / "a.txt").write_text(" ".join(WORDS[1:]))
    windows = _text(folder, path=str(folder / "a.txt"), length=7)
    assert [sample["input_ids"].tolist() for sample, _ in windows] == [
        [0, *range(start, start + 6)] for start in (1, 7, 13)
    ]
    overlapping = _text(folder, path=str(folder / "a.txt"), length=7, stride=3)
    assert all(labels[0] == -100 for _, labels in (*windows, *overlapping))
    for samples in (windows, overlapping):
        counted = [label for _, labels in samples for label in labels if label != -100]
        assert counted == list(range(1, 19))
