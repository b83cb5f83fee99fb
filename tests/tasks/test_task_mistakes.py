"""Wrong folders, data and calls: one clear error each, before a model is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
import task_folders as made  # noqa: E402

from neural_mp.errors import (  # noqa: E402
    ConfigurationError,
    DataError,
    MissingFrameworkError,
    ModelLoadError,
)
from neural_mp.tasks.tuning import prepare_run  # noqa: E402

TASK = "text-classification"
GOOD = [{"text": "w1 good", "label": "good"}, {"text": "w2 bad", "label": 0}]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made.write_rows(Path("good.jsonl"), GOOD)


@pytest.fixture
def folder(folder_of):
    shutil.copytree(folder_of("text_classifier"), "model")
    return Path("model")


def edit_config(folder, **entries):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **entries}))


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def no_config(folder):
    (folder / "config.json").unlink()


def damaged_config(folder):
    (folder / "config.json").write_text("{")


def other_task(folder):
    edit_config(folder, architectures=["BertForMaskedLM"])


def no_class(folder):
    edit_config(folder, architectures=None)


def foreign_code(folder):
    edit_config(folder, auto_map={"AutoModel": "code.Model"})


def no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


def damaged_tokenizer(folder):
    (folder / "tokenizer.json").write_text("{}")


def other_tokenizer(folder):
    edit_config(folder, vocab_size=5)


def several_labels(folder):
    edit_config(folder, problem_type="multi_label_classification")


FOLDERS = {
    no_weights: (ModelLoadError, r"'model' must contain weights \(\*.safetensors"),
    no_config: (ModelLoadError, r"'model' must contain config.json"),
    damaged_config: (ModelLoadError, r"config.json"),
    other_task: (
        ModelLoadError,
        r"must hold a model of text-classification, e.g. BertForSequenceClassification, got "
        r"'BertForMaskedLM'",
    ),
    no_class: (ModelLoadError, r"must hold a model of text-classification.* got None"),
    foreign_code: (ModelLoadError, r"auto_map.*runs only if 'remote_code' is trusted"),
    no_tokenizer: (
        ModelLoadError,
        r"must have the files of a tokenizer \(tokenizer.json, .*got none",
    ),
    damaged_tokenizer: (ModelLoadError, r"must have the files of the tokenizer, which cannot be"),
    other_tokenizer: (ModelLoadError, r"which has 5 tokens, got token"),
    several_labels: (ConfigurationError, r"must have one class per sample"),
}


@pytest.mark.parametrize("change", FOLDERS, ids=lambda change: change.__name__)
def test_a_wrong_folder_is_one_clear_error(folder, change):
    kind, message = FOLDERS[change]
    change(folder)
    with pytest.raises(kind, match=message):
        prepare_run(folder, TASK, "good.jsonl")


def test_a_missing_folder_and_an_unknown_task_are_named(folder):
    with pytest.raises(ConfigurationError, match="there is no model folder 'nowhere'"):
        prepare_run("nowhere", TASK, "good.jsonl")
    with pytest.raises(ConfigurationError, match="did you mean 'text-classification'"):
        prepare_run(folder, "text-clasification", "good.jsonl")
    with pytest.raises(ConfigurationError, match="batch_size must be at least 1, got 0"):
        prepare_run(folder, TASK, "good.jsonl", batch_size=0)


DATA = {
    "empty.jsonl": ("", r"must have at least one row, got none"),
    "broken.jsonl": ('{"text": "a", "label": 1}\n{"text"\n', r"broken.jsonl, line 2"),
    "list.jsonl": ("[1, 2]\n", r"line 1 must be an object of columns, got \[1, 2\]"),
    "column.jsonl": (
        '{"words": "a", "label": 1}\n',
        r"line 1 must have the column 'text' or .* got 'words', 'label'; rename",
    ),
    "class.jsonl": (
        '{"text": "a", "label": 1}\n{"text": "a", "label": "great"}\n',
        r"line 2: 'label' must be a class of the model, 'bad', 'good', .* got 'great'",
    ),
    "index.jsonl": ('{"text": "a", "label": 2}\n', r"an index from 0 to 1, got 2"),
    "missing.jsonl": (
        '{"text": "a", "label": null}\n',
        r"line 1 must have a value for 'label'",
    ),
    "ragged.csv": ("text,label\na,1\nb\n", r"ragged.csv, line 3 must have 2 columns"),
    "latin.csv": (b"text,label\n\xe9,1\n", r"is no table of UTF-8 text"),
    "data.txt": ("a\n", r"must be a file of .jsonl, .csv, .parquet.* got 'data.txt'"),
}


@pytest.mark.parametrize("name", DATA)
def test_a_wrong_data_file_is_one_clear_error(folder_of, name):
    content, message = DATA[name]
    data = content if isinstance(content, bytes) else content.encode()
    Path(name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        prepare_run(folder_of("text_classifier"), TASK, name)


def test_a_text_that_is_none_is_named_with_its_line(folder_of):
    made.write_rows(Path("number.jsonl"), [{"text": 5, "label": 1}])
    with pytest.raises(DataError, match="line 1: 'text' must be a text that is not empty, got 5"):
        prepare_run(folder_of("text_classifier"), TASK, "number.jsonl")


def test_files_of_images_must_exist_and_folders_have_classes(folder_of):
    folder, task = folder_of("image_classifier"), "image-classification"
    made.write_rows(Path("images.jsonl"), [{"image": "gone.png", "label": 0}])
    with pytest.raises(DataError, match=r"line 1: there is no file 'gone.png' of 'image'"):
        prepare_run(folder, task, "images.jsonl")
    Path("flat").mkdir()
    with pytest.raises(DataError, match=r"must contain a folder of files \(.png, .*for each class"):
        prepare_run(folder, task, "flat")
    with pytest.raises(DataError, match=r"got the folder 'flat'"):
        prepare_run(folder_of("text_classifier"), TASK, "flat")


def test_tags_and_boxes_must_fit_the_model(folder_of):
    made.write_rows(Path("tags.jsonl"), [{"tokens": ["a", "b"], "tags": ["O"]}])
    with pytest.raises(DataError, match="'tags' must be a tag for each of 2 tokens"):
        prepare_run(folder_of("token_classifier"), "token-classification", "tags.jsonl")
    made.write_rows(Path("tags.jsonl"), [{"tokens": ["a"], "tags": ["B-LOC"]}])
    with pytest.raises(DataError, match="'tags' must be classes of the model, 'O', .*got 'B-LOC'"):
        prepare_run(folder_of("token_classifier"), "token-classification", "tags.jsonl")
    scenes = made.scenes(Path("scenes"), np.random.default_rng(0), 1)
    row = {"file_name": "0.png", "objects": {"bbox": [[1, 2, 3]], "category": [1]}}
    made.write_rows(scenes / "metadata.jsonl", [row])
    with pytest.raises(DataError, match=r"'objects' must be a dict of bbox"):
        prepare_run(folder_of("detector"), "object-detection", scenes)


def test_parquet_files_are_read_like_others(folder_of):
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(GOOD[:1]), "data.parquet")
    run = prepare_run(folder_of("text_classifier"), TASK, "data.parquet")
    assert run.converter.eval_dataloader[0][1]["truth"] == [1]
    Path("bad.parquet").write_text("no")
    with pytest.raises(DataError, match="is no parquet file"):
        prepare_run(folder_of("text_classifier"), TASK, "bad.parquet")


def test_pyarrow_is_named_where_it_is_missing(folder_of, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    Path("data.parquet").write_text("x")
    with pytest.raises(MissingFrameworkError, match="pyarrow; install"):
        prepare_run(folder_of("text_classifier"), TASK, "data.parquet")


def test_a_call_with_another_input_names_the_columns(folder_of):
    from neural_mp.tasks.table import TASKS

    with pytest.raises(DataError, match="must have the keys question, context, answers, got text"):
        TASKS["question-answering"].make_row({"text": "a"})
