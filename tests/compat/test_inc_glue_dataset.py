"""What `GLUE` and PyTorch's `bert` stand for in files of Intel Neural Compressor."""

import json
import sys

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.data import build_dataloader, build_dataset
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "ran",
    "on",
    "mat",
    ".",
    "The",
]
NUMBER = {word: number for number, word in enumerate(WORDS)}
CLS, SEP = NUMBER["[CLS]"], NUMBER["[SEP]"]


def numbers(text):
    return [NUMBER[token] for token in text.split()]


@pytest.fixture
def tokenizer(tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return str(folder)


def write(path, *rows):
    path.write_text("".join("\t".join(row) + "\n" for row in rows), encoding="utf-8-sig")


def mrpc(folder, name="dev.tsv"):
    write(
        folder / name,
        ("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String"),
        ("1", "11", "12", "The cat sat", "the cat sat on the mat"),
        ("0", "21", "22", 'a "dog" ran', "the cat sat"),
        ("1", "31", "32", "a dog", "the dog"),
    )


def dataset(name="GLUE", framework="onnxrt", **options):
    return build_dataset({name: options}, load_vocabulary(framework))


def test_two_sentences_become_ids_a_mask_and_segments(tmp_path, tokenizer):
    mrpc(tmp_path)
    samples = dataset(data_dir=str(tmp_path), model_name_or_path=tokenizer, max_seq_length=16)
    (ids, mask, segments), label = samples[0]
    first, second = numbers("the cat sat"), numbers("the cat sat on the mat")
    expected = [CLS, *first, SEP, *second, SEP]
    assert ids.tolist() == expected + [0] * (16 - len(expected))
    assert mask.tolist() == [1] * len(expected) + [0] * (16 - len(expected))
    assert segments.tolist() == [0] * 5 + [1] * 7 + [0] * 4
    assert (ids.dtype, mask.dtype, segments.dtype) == (np.int64,) * 3
    assert [int(label) for _, label in samples] == [1, 0, 1]
    assert label.dtype == np.int64


def test_letters_stay_large_where_that_is_said(tmp_path, tokenizer):
    mrpc(tmp_path)
    options = {"data_dir": str(tmp_path), "model_name_or_path": tokenizer, "max_seq_length": 16}
    (ids, *_), _ = dataset(do_lower_case=False, **options)[0]
    assert ids[1] == NUMBER["The"]


def test_long_samples_are_cut(tmp_path, tokenizer):
    mrpc(tmp_path)
    samples = dataset(data_dir=str(tmp_path), model_name_or_path=tokenizer, max_seq_length=6)
    assert all(array.shape == (6,) for inputs, _ in samples for array in inputs)
    assert samples[0][0][1].tolist() == [1] * 6


@pytest.mark.parametrize("model_type", ["distilbert", "mobilebert", "roberta"])
def test_other_models_than_bert_get_no_segments(model_type, tmp_path, tokenizer):
    mrpc(tmp_path)
    samples = dataset(data_dir=str(tmp_path), model_name_or_path=tokenizer, model_type=model_type)
    inputs, _ = samples[0]
    assert [array.shape for array in inputs] == [(128,), (128,)]


@pytest.mark.parametrize(("dynamic_length", "lengths"), [(False, [16, 16]), (True, [12, 7])])
def test_a_batch_of_dynamic_length_is_as_long_as_its_longest_sample(
    dynamic_length, lengths, tmp_path, tokenizer
):
    mrpc(tmp_path)
    options = {
        "data_dir": str(tmp_path),
        "model_name_or_path": tokenizer,
        "max_seq_length": 16,
        "dynamic_length": dynamic_length,
    }
    spec = {"dataset": {"GLUE": options}, "batch_size": 2}
    batches = list(build_dataloader(spec, load_vocabulary("onnxrt")))
    assert [[array.shape for array in inputs] for inputs, _ in batches] == [
        [(2, lengths[0])] * 3,
        [(1, lengths[1])] * 3,
    ]
    assert [labels.tolist() for _, labels in batches] == [[1, 0], [1]]


def test_the_samples_to_train_on_are_those_of_another_file(tmp_path, tokenizer):
    mrpc(tmp_path, "train.tsv")
    options = {"data_dir": str(tmp_path), "model_name_or_path": tokenizer}
    assert len(dataset(evaluate=False, **options)) == 3
    with pytest.raises(DataError, match=r"dev\.tsv does not exist"):
        dataset(**options)


NEUTRAL, ENTAILMENT = ("1", "a dog", "the dog", "neutral"), ("2", "a cat", "the cat", "entailment")
PAIRS = ("index", "sentence1", "sentence2")


@pytest.mark.parametrize(
    ("task", "file", "rows", "labels"),
    [
        (
            "cola",
            "dev.tsv",
            [("gj04", "1", "", "the cat sat"), ("gj04", "0", "*", "sat the")],
            [1, 0],
        ),
        (
            "MNLI",
            "dev_matched.tsv",
            [(*PAIRS, "gold_label"), NEUTRAL, ENTAILMENT],
            [2, 1],
        ),
        (
            "rte",
            "dev.tsv",
            [(*PAIRS, "label"), ENTAILMENT, ("3", "a", "the", "not_entailment")],
            [0, 1],
        ),
        (
            "qnli",
            "dev.tsv",
            [("index", "question", "sentence", "label"), ENTAILMENT],
            [0],
        ),
        ("wnli", "dev.tsv", [(*PAIRS, "label"), ("0", "a cat", "the cat", "1")], [1]),
        (
            "qqp",
            "dev.tsv",
            [
                ("id", "qid1", "qid2", "question1", "question2", "is_duplicate"),
                ("1", "2", "3", "a cat", "the cat", "1"),
                ("4", "5", "cut off"),
            ],
            [1],
        ),
        ("sts-b", "dev.tsv", [(*PAIRS, "score"), ("0", "a cat", "the cat", "3.75")], [3.75]),
    ],
)
def test_every_task_is_read_in_its_form(task, file, rows, labels, tmp_path, tokenizer):
    write(tmp_path / file, *rows)
    samples = dataset(data_dir=str(tmp_path), model_name_or_path=tokenizer, task=task)
    assert [label.item() for _, label in samples] == labels
    assert samples[0][1].dtype == (np.float32 if task == "sts-b" else np.int64)
    if task == "cola":
        assert samples[0][0][0][:5].tolist() == [CLS, *numbers("the cat sat"), SEP]


def test_roberta_has_the_classes_of_mnli_in_another_order(tmp_path, tokenizer):
    write(tmp_path / "dev_matched.tsv", (*PAIRS, "gold_label"), NEUTRAL, ENTAILMENT)
    samples = dataset(
        data_dir=str(tmp_path), model_name_or_path=tokenizer, task="mnli", model_type="roberta"
    )
    assert [int(label) for _, label in samples] == [1, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([("Quality", "#1 String"), ("1", "a")], "has no column '#2 String'"),
        (
            [("Quality", "#1 String", "#2 String"), ("1", "a")],
            "line 2: at least 3 cells are expected",
        ),
        (
            [("Quality", "#1 String", "#2 String"), ("2", "a", "b")],
            "line 2: label must be one of 0, 1, got '2'",
        ),
        ([("Quality", "#1 String", "#2 String")], "has no samples"),
    ],
)
def test_a_table_of_another_form_is_said(rows, message, tmp_path, tokenizer):
    write(tmp_path / "dev.tsv", *rows)
    with pytest.raises(DataError, match=message):
        dataset(data_dir=str(tmp_path), model_name_or_path=tokenizer)


@pytest.mark.parametrize("name", ["a-model-that-is-nowhere", "."])
def test_a_tokenizer_is_never_downloaded(name, tmp_path):
    pytest.importorskip("transformers")
    mrpc(tmp_path)
    with pytest.raises(DataError, match="no tokenizer can be read from .*nothing is downloaded"):
        dataset(data_dir=str(tmp_path), model_name_or_path=name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "mrcp"}, "did you mean 'mrpc'"),
        ({"model_type": "gpt"}, "GLUE: model_type must be 'distilbert' or"),
        ({"max_seq_length": 0}, "GLUE: max_seq_length must be a whole number from 1"),
    ],
)
def test_a_wrong_option_is_said(options, message, tmp_path):
    with pytest.raises(ConfigurationError, match=message):
        dataset(data_dir=str(tmp_path), model_name_or_path="tokenizer", **options)


def test_without_transformers_the_error_names_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[text\]"):
        dataset(data_dir=str(tmp_path), model_name_or_path="tokenizer")


# bert for PyTorch


SAMPLE = tuple(np.full(4, number) for number in range(6))


@pytest.mark.parametrize(
    ("task", "model_type", "names"),
    [
        ("classifier", "bert", {"input_ids", "attention_mask", "labels", "token_type_ids"}),
        ("classifier", "distilbert", {"input_ids", "attention_mask", "labels"}),
        ("squad", "bert", {"input_ids", "attention_mask", "token_type_ids"}),
        (
            "squad",
            "xlnet",
            {"input_ids", "attention_mask", "token_type_ids", "cls_index", "p_mask"},
        ),
    ],
)
def test_bert_for_pytorch_names_the_tensors(task, model_type, names):
    samples = dataset("bert", "pytorch", dataset=[SAMPLE], task=task, model_type=model_type)
    inputs, label = samples[0]
    assert set(inputs) == names
    assert inputs["attention_mask"][0] == 1
    assert label[0] == 3


def test_a_path_is_no_dataset_for_bert():
    with pytest.raises(DataError, match="must be a dataset made in Python"):
        dataset("bert", "pytorch", dataset="data", task="squad")
