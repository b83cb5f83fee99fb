"""Answers and metrics of tasks, compared with the pipelines and classes of transformers."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import accuracy_score

transformers = pytest.importorskip("transformers")
import task_folders as made  # noqa: E402
import torch  # noqa: E402

from neural_mp.metrics import convert_to_metric  # noqa: E402
from neural_mp.tasks.table import TASKS  # noqa: E402
from neural_mp.tasks.tuning import prepare_run  # noqa: E402

RANDOM = np.random.default_rng(3)
START = RANDOM.bit_generator.state


@pytest.fixture(autouse=True)
def _same_data_in_any_order():
    RANDOM.bit_generator.state = START


class Original:
    """The model of a folder in transformers, called with arrays."""

    def __init__(self, folder, task):
        kind = getattr(transformers, TASKS[task].auto_class)
        self.model = kind.from_pretrained(folder).eval()

    def __call__(self, inputs):
        with torch.no_grad():
            outputs = self.model(**{name: torch.from_numpy(v) for name, v in inputs.items()})
        return {name: value.numpy() for name, value in outputs.items()}


def answered(folder, task, items, tmp_path, data):
    """The answers to items, and the accuracy on a data file, of the original model."""
    run = prepare_run(folder, task, data, batch_size=7)
    model = Original(folder, task)
    metric = convert_to_metric(run.converter.metric)
    metric.reset()
    for inputs, labels in run.converter.eval_dataloader:
        metric.update(*run.converter.postprocess((model(inputs), labels)))
    declared = TASKS[task]
    rows = [declared.make_row(item) for item in items]
    folder_of_run = run.converter.postprocess.folder
    return declared.answer_rows(model, folder_of_run, rows), metric.result()


def test_classes_of_texts_are_those_of_the_pipeline(folder_of, tmp_path):
    rows = made.opinions(RANDOM, 50)
    data = made.write_rows(tmp_path / "data.jsonl", rows)
    folder, texts = folder_of("text_classifier"), [row["text"] for row in rows]
    answers, accuracy = answered(folder, "text-classification", texts, tmp_path, data)
    expected = transformers.pipeline("text-classification", model=str(folder))(texts)
    assert [a["label"] for a in answers] == [e["label"] for e in expected]
    scores = [e["score"] for e in expected]
    assert [a["score"] for a in answers] == pytest.approx(scores, rel=1e-4)
    truth = [row["label"] for row in rows]
    assert accuracy == pytest.approx(accuracy_score(truth, [e["label"] for e in expected]))


def test_spans_are_those_of_the_pipeline(folder_of, tmp_path):
    rows = made.tagged(RANDOM, 40)
    data = made.write_rows(tmp_path / "data.jsonl", rows)
    folder = folder_of("token_classifier")
    texts = [" ".join(row["tokens"]) for row in rows]
    answers, score = answered(folder, "token-classification", texts, tmp_path, data)
    pipeline = transformers.pipeline(
        "token-classification", model=str(folder), aggregation_strategy="simple"
    )
    expected = [[(e["entity_group"], e["word"]) for e in row] for row in pipeline(texts)]
    assert [[(a["entity"], a["text"]) for a in row] for row in answers] == expected
    assert score > 0.9


@pytest.mark.parametrize("mode", ["mean", "cls", "max"])
def test_embeddings_are_pooled_as_sentence_transformers_does(folder_of, tmp_path, mode):
    folder = made.sentence_encoder(tmp_path / "encoder")
    key = {"mean": "mean_tokens", "cls": "cls_token", "max": "max_tokens"}[mode]
    (folder / "1_Pooling/config.json").write_text(f'{{"pooling_mode_{key}": true}}')
    data = made.write_rows(tmp_path / "data.jsonl", made.alike(RANDOM, 20))
    texts = ["w1 w2 w3", "w4"]
    answers, _ = answered(folder, "sentence-similarity", texts, tmp_path, data)
    for text, answer in zip(texts, answers, strict=True):  # alone, without padding
        encoded = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="np")
        states = Original(folder, "sentence-similarity")(encoded)["last_hidden_state"][0]
        pooled = {"mean": states.mean(0), "cls": states[0], "max": states.max(0)}[mode]
        assert answer == pytest.approx(pooled / np.linalg.norm(pooled), abs=1e-5)


def test_scores_of_pairs_are_those_of_the_model(folder_of, tmp_path):
    data = made.write_rows(tmp_path / "data.jsonl", made.ranked(RANDOM, 10))
    folder, pairs = folder_of("reranker"), [("w1 w2", "w3"), ("w4", "w5 w6 w7")]
    answers, score = answered(folder, "text-ranking", pairs, tmp_path, data)
    pipeline = transformers.pipeline("text-classification", model=str(folder))
    items = [{"text": a, "text_pair": b} for a, b in pairs]
    expected = [pipeline(item, function_to_apply="none") for item in items]
    assert answers == pytest.approx([e["score"] for e in expected], rel=1e-4)
    assert 0 < score <= 1


def test_answers_are_found_in_every_part_of_a_long_context(folder_of, tmp_path):
    data = made.write_rows(tmp_path / "data.jsonl", made.asked(RANDOM, 30))
    rest = ["w5"] * 150
    contexts = [" ".join([*rest[:place], "carl", *rest[place:]]) for place in (3, 75, 149)]
    items = [("w1 w2", context) for context in contexts]
    folder = folder_of("question_answerer")
    answers, score = answered(folder, "question-answering", items, tmp_path, data)
    assert answers == ["carl"] * 3
    assert score > 0.9


def test_classes_of_images_are_those_of_the_pipeline(folder_of, tmp_path):
    from PIL import Image

    data = made.pictures(tmp_path / "pictures", RANDOM, 20)
    files = sorted(data.glob("*/*.png"))
    folder = folder_of("image_classifier")
    answers, accuracy = answered(folder, "image-classification", files, tmp_path, data)
    pipeline = transformers.pipeline("image-classification", model=str(folder))
    expected = [row[0] for row in pipeline([Image.open(file) for file in files])]
    assert [a["label"] for a in answers] == [e["label"] for e in expected]
    truth = [file.parent.name for file in files]
    assert accuracy == pytest.approx(accuracy_score(truth, [e["label"] for e in expected]))


def test_sound_is_resampled_to_the_rate_of_the_model(folder_of, tmp_path):
    data = made.sounds(tmp_path / "sounds", RANDOM, 20)
    folder = folder_of("audio_classifier")
    waves = [made.tone(RANDOM, kind, 8000) for kind in ("low", "high")]
    answers, accuracy = answered(folder, "audio-classification", waves, tmp_path, data)
    assert [answer["label"] for answer in answers] == ["low", "high"]
    assert accuracy > 0.9  # the files have half the rate


def test_transcripts_of_ctc_are_those_of_the_pipeline(folder_of, tmp_path):
    pytest.importorskip("jiwer")
    data = made.spoken(tmp_path / "sounds", RANDOM, 6)
    waves = [made.tone(RANDOM, kind, 8000) for kind in ("low", "high")]
    folder, task = folder_of("ctc_recognizer"), "automatic-speech-recognition"
    # One by one, as padding without a mask changes the outputs.
    answers = [answered(folder, task, [wave], tmp_path, data)[0][0] for wave in waves]
    rate = answered(folder, task, waves[:1], tmp_path, data)[1]
    pipeline = transformers.pipeline(task, model=str(folder))
    expected = [pipeline({"raw": wave, "sampling_rate": 8000})["text"] for wave in waves]
    assert answers == expected
    assert rate > 0.5  # random weights


def test_segments_are_those_of_the_processor(folder_of, tmp_path):
    data = made.scenes(tmp_path / "scenes", RANDOM, 8)
    images = [made.scene(RANDOM)[0] for _ in range(3)]
    folder = folder_of("segmenter")
    answers, score = answered(folder, "image-segmentation", images, tmp_path, data)
    pipeline = transformers.pipeline("image-segmentation", model=str(folder))
    from PIL import Image

    for image, answer in zip(images, answers, strict=True):
        masks = {part["label"]: part["mask"] for part in pipeline(Image.fromarray(image))}
        expected = np.array(masks["square"]) > 0 if "square" in masks else np.zeros(answer.shape)
        assert (answer == 1).tolist() == (expected > 0).tolist()
    assert score > 0.5


def test_objects_are_those_of_the_pipeline(folder_of, tmp_path):
    from PIL import Image

    data = made.scenes(tmp_path / "scenes", RANDOM, 8)
    images = [made.scene(RANDOM)[0] for _ in range(3)]
    folder = folder_of("detector")
    answers, score = answered(folder, "object-detection", images, tmp_path, data)
    pipeline = transformers.pipeline("object-detection", model=str(folder))
    for image, answer in zip(images, answers, strict=True):
        expected = pipeline(Image.fromarray(image), threshold=0.5)
        assert [a["label"] for a in answer] == [e["label"] for e in expected]
        corners = [[e["box"][key] for key in ("xmin", "ymin", "xmax", "ymax")] for e in expected]
        # The pipeline rounds down to pixels.
        assert np.floor([a["box"] for a in answer]).tolist() == corners
    assert 0 <= score <= 1  # the boxes are rough


def test_a_batch_is_encoded_again_for_every_pass(folder_of, tmp_path):
    data = made.write_rows(tmp_path / "data.jsonl", made.opinions(RANDOM, 20))
    run = prepare_run(folder_of("text_classifier"), "text-classification", data, batch_size=8)
    batches = run.converter.eval_dataloader
    assert [len(labels["truth"]) for _, labels in batches] == [8, 8, 4]
    assert len(batches[1:]) == 2
    assert np.array_equal(batches[-1][0]["input_ids"], list(batches)[2][0]["input_ids"])
