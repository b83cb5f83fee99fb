"""Encoder-decoders as two graphs under one metric, compared with `generate` of transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
import task_folders as made  # noqa: E402
import torch  # noqa: E402

import neural_mp  # noqa: E402
from neural_mp.adaptors.pytorch.decoders.transformers_folder import (  # noqa: E402
    split_encoder_decoder,
)
from neural_mp.errors import (  # noqa: E402
    ConfigurationError,
    ConversionError,
    DataError,
    ModelLoadError,
)
from neural_mp.tasks.folders import open_folder  # noqa: E402
from neural_mp.tasks.sequences import GenerationSettings  # noqa: E402
from neural_mp.tasks.table import choose_variant, find_task  # noqa: E402
from neural_mp.tasks.tuning import prepare_run  # noqa: E402

QUICK = {"runtime": "source", "precisions": "int8", "exit_policy": {"max_trials": 3}}
SPEECH = "automatic-speech-recognition"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def in_torch(module):
    """A part that is called with arrays."""

    def run(*arrays):
        with torch.no_grad():
            return module(*map(torch.from_numpy, arrays))

    return run


def written(folder, task, items, **options):
    """The texts that both parts of the original model write."""
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    declared = choose_variant(find_task(task), config)
    opened = open_folder(folder, declared.processor, None)
    parts = {name: in_torch(part) for name, part in split_encoder_decoder(folder).items()}
    rows = [declared.make_row(item) for item in items]
    return declared.write_texts(parts, opened, rows, **options)


def test_translations_are_those_of_generate(folder_of):
    folder = folder_of("translator")
    texts = [row["text"] for row in made.translated(np.random.default_rng(3), 12)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    ids = model.generate(**inputs, num_beams=1, do_sample=False, max_new_tokens=20)
    expected = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert written(folder, "translation", texts, max_new_tokens=20) == expected
    assert {*expected} == {"good fine great nice", "bad poor awful"}


def test_transcripts_are_those_of_generate(folder_of):
    folder = folder_of("recognizer")
    waves = [
        made.tone(np.random.default_rng(n), kind, 8000) for n, kind in enumerate(["low", "high"])
    ]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(folder)
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = extractor(waves, sampling_rate=8000, return_tensors="pt")["input_features"]
    with torch.no_grad():  # `generate` of Whisper prescribes tokens that this vocabulary lacks
        ids = torch.full((2, 1), 2)
        for _ in range(4):
            logits = model(features, decoder_input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    ends = [row[: row.index(3)] for row in ids.tolist()]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    expected = tokenizer.batch_decode(ends, skip_special_tokens=True)
    assert written(folder, SPEECH, waves) == expected == ["bad", "good fine"]


def test_the_decoder_leaves_the_encoder_out_and_shares_weights_with_none_twice(folder_of):
    folder = folder_of("translator")
    parts = split_encoder_decoder(folder)
    whole = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    names = [name for name, _ in parts["decoder"].named_parameters()]
    assert not [name for name in names if ".encoder." in name]
    count = sum(p.numel() for p in whole.parameters())
    shared = whole.get_input_embeddings().weight.numel()
    sizes = [sum(p.numel() for p in part.parameters()) for part in parts.values()]
    assert sum(sizes) <= count + shared


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_both_graphs_are_tuned_under_one_target_and_called_with_texts(folder_of):
    pytest.importorskip("sacrebleu")
    rows = made.translated(np.random.default_rng(5), 32)
    data = made.write_rows(Path("data.jsonl"), rows)
    folder = folder_of("translator")
    options = {**QUICK, "objective": "modelsize"}
    result = neural_mp.tune_folder(folder, "translation", data, "out", **options)
    assert result.report.metric == "bleu"
    assert result.met
    assert {op.partition("/")[0] for op, c in result.plan.items() if c.precision == "int8"} == {
        "encoder",
        "decoder",
    }
    with pytest.raises(ConversionError, match="must be of one graph .* got a result in parts"):
        result.save_layout("hub")
    texts = ["w1 good w2", "w3 awful"]
    answers = neural_mp.load("out")(texts)
    assert answers == result(texts) == ["good fine great nice", "bad poor awful"]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
def test_speech_is_judged_by_its_word_error_rate(folder_of):
    pytest.importorskip("jiwer")
    data = made.spoken(Path("sounds"), np.random.default_rng(5), 12)
    options = {**QUICK, "accuracy_criterion": {"absolute": 0.01}}
    result = neural_mp.tune_folder(folder_of("recognizer"), SPEECH, data, "out", **options)
    assert result.report.metric == "wer"
    assert result.report.baseline_accuracy == 0
    assert result.met
    assert neural_mp.load("out")([Path("sounds/0.wav"), Path("sounds/1.wav")]) == [
        "good fine",
        "bad",
    ]


def test_settings_of_whisper_begin_with_language_and_task(folder_of, tmp_path):
    folder = open_folder(folder_of("recognizer"), "AutoProcessor", None)
    copied = tmp_path / "copied"
    copied.mkdir()
    values = (
        '{"decoder_start_token_id": 2, "eos_token_id": 3, "lang_to_id": {"<|en|>": 7, "<|de|>": 8},'
        ' "task_to_id": {"transcribe": 9}, "no_timestamps_token_id": 10, "suppress_tokens": [4]}'
    )
    (copied / "generation_config.json").write_text(values)
    changed = type(folder)(copied, folder.config, folder.processor)
    settings = GenerationSettings.from_folder(changed, "de")
    assert settings.prefix == (2, 8, 9, 10)
    logits = np.zeros((1, 12))
    logits[0, 4], logits[0, 5] = 3, 2
    assert settings.choose(logits, 6).tolist() == [5]
    with pytest.raises(
        DataError, match=r"language must be one of the model's \(en, de, …\), got 'fr'"
    ):
        GenerationSettings.from_folder(changed, "fr")
    (copied / "generation_config.json").write_text("{}")
    missing = type(folder)(copied, {}, folder.processor)
    with pytest.raises(ModelLoadError, match="must set decoder_start_token_id"):
        GenerationSettings.from_folder(missing, "en")


def test_calibration_data_are_those_of_the_evaluation(folder_of):
    data = made.write_rows(Path("data.jsonl"), made.translated(np.random.default_rng(5), 4))
    with pytest.raises(ConfigurationError, match="calibration must be unset for translation"):
        prepare_run(folder_of("translator"), "translation", data, calibration=data)
    made.write_rows(Path("bad.jsonl"), [{"text": "w1", "target": 5}])
    with pytest.raises(DataError, match="line 1: 'target' must be a text"):
        prepare_run(folder_of("translator"), "translation", "bad.jsonl")
