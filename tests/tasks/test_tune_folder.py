"""Model folders tuned for their task, saved, and loaded again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")
import task_folders as made  # noqa: E402
from typer.testing import CliRunner  # noqa: E402

import neural_mp  # noqa: E402
from neural_mp.cli.app import app  # noqa: E402
from neural_mp.errors import NeuralMPError  # noqa: E402
from neural_mp.tasks.task_model import TaskModel  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]
QUICK = {"runtime": "source", "precisions": "int8", "exit_policy": {"max_trials": 3}}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(function, count=48):
    return made.write_rows(Path("data.jsonl"), function(np.random.default_rng(5), count))


def test_a_classifier_is_tuned_saved_and_called_with_texts(folder_of):
    data = rows(made.opinions)
    folder = folder_of("text_classifier")
    result = neural_mp.tune_folder(folder, "text-classification", data, "out", **QUICK)
    assert result.met
    assert result.plan.counts()["int8"] > 0
    assert result.report.metric == "Accuracy"
    answers = result(["w1 w2 good w3", "w4 awful"])
    assert [answer["label"] for answer in answers] == ["good", "bad"]
    assert result("w1 great") == result(["w1 great"])[0]
    loaded = neural_mp.load("out")
    assert isinstance(loaded, TaskModel)
    texts = [row["text"] for row in made.opinions(np.random.default_rng(6), 9)]
    again = loaded(texts, batch_size=4)
    assert [a["label"] for a in again] == [a["label"] for a in result(texts)]
    assert [a["score"] for a in again] == pytest.approx([a["score"] for a in result(texts)])
    # Tokenizer and configuration are those of the source, for other tools.
    assert (Path("out") / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()
    assert json.loads((Path("out") / "config.json").read_text())["id2label"]["1"] == "good"


def test_embeddings_without_labels_are_compared_with_fp32_after_pooling(folder_of):
    texts = [{"text": row["sentence1"]} for row in made.alike(np.random.default_rng(5), 32)]
    data = made.write_rows(Path("data.jsonl"), texts)
    folder = folder_of("sentence_encoder")
    result = neural_mp.tune_folder(folder, "feature-extraction", data, "out", **QUICK)
    assert result.report.metric == "Cosine"
    assert result.report.baseline_accuracy == pytest.approx(1, abs=1e-6)
    assert 0.99 < result.report.accuracy <= 1
    words = [row["text"] for row in texts]
    encoded = transformers.AutoTokenizer.from_pretrained(folder)(
        words, padding=True, return_tensors="pt"
    )
    encoded.pop("token_type_ids", None)
    states = transformers.AutoModel.from_pretrained(folder).eval()(**encoded).last_hidden_state
    mask = encoded["attention_mask"][..., None]
    pooled = ((states * mask).sum(1) / mask.sum(1)).detach().numpy()
    cosines = (pooled / np.linalg.norm(pooled, axis=1, keepdims=True) * result(words)).sum(1)
    assert result.report.accuracy == pytest.approx(cosines.mean(), abs=1e-5)
    vectors = neural_mp.load("out")(["w1 w2", "w3", "w4 w5 w6"], batch_size=2)
    assert vectors.shape == (3, 64)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx(np.ones(3), abs=1e-5)
    assert (Path("out") / "modules.json").is_file()
    assert (Path("out") / "1_Pooling/config.json").is_file()


def test_images_of_a_folder_are_tuned_and_paths_are_answered(folder_of):
    data = made.pictures(Path("pictures"), np.random.default_rng(5), 24)
    folder = folder_of("image_classifier")
    result = neural_mp.tune_folder(folder, "image-classification", data, "out", **QUICK)
    assert result.met
    answers = neural_mp.load("out")([Path("pictures/upper/1.png"), "pictures/lower/0.png"])
    assert [answer["label"] for answer in answers] == ["upper", "lower"]


def test_another_runtime_gives_the_same_answers(folder_of):
    pytest.importorskip("onnxruntime")
    options = {**QUICK, "runtime": "onnxrt"}
    data = rows(made.tagged)
    folder = folder_of("token_classifier")
    result = neural_mp.tune_folder(folder, "token-classification", data, "out", **options)
    assert result.framework == "onnxrt"
    (spans,) = neural_mp.load("out")(["w1 anna carl w3"])
    assert spans == [{"entity": "PER", "text": "anna carl", "start": 1, "end": 3}]


@pytest.mark.parametrize("runtime", ["source", "onnxrt"])
def test_the_layout_of_the_hub_runs_in_onnx_runtime_with_the_tokenizer_beside(folder_of, runtime):
    ort = pytest.importorskip("onnxruntime")
    options = {**QUICK, "runtime": runtime}
    data, folder = rows(made.opinions), folder_of("text_classifier")
    result = neural_mp.tune_folder(folder, "text-classification", data, "out", **options)
    file = neural_mp.load("out").save_layout("hub")
    assert file == Path("hub/onnx/model_quantized.onnx")
    tokenizer = transformers.AutoTokenizer.from_pretrained("hub")
    config = transformers.AutoConfig.from_pretrained("hub")
    session = ort.InferenceSession(str(file))
    texts = ["w1 good w2 w3", "awful w4"]
    inputs = dict(tokenizer(texts, return_tensors="np", padding=True))
    names = [entry.name for entry in session.get_inputs()]
    (logits,) = session.run(["logits"], {name: inputs[name] for name in names})
    classes = [config.id2label[index] for index in logits.argmax(1)]
    assert classes == [answer["label"] for answer in result(texts)] == ["good", "bad"]
    card = Path("hub/README.md").read_text()
    assert card == Path("out/README.md").read_text()
    assert "pipeline_tag: text-classification" in card
    assert "--task text-classification --data data.jsonl --output OUT" in card
    assert "| Accuracy" in card
    assert result.record.setup.machine.name in card
    with pytest.raises(NeuralMPError, match="'hub' must be a new or empty folder"):
        result.save_layout("hub")


def test_the_layout_of_openvino_is_read_by_openvino(folder_of):
    openvino = pytest.importorskip("openvino")
    texts = [{"text": row["sentence1"]} for row in made.alike(np.random.default_rng(5), 32)]
    data = made.write_rows(Path("data.jsonl"), texts)
    folder, options = folder_of("sentence_encoder"), {**QUICK, "runtime": "openvino"}
    result = neural_mp.tune_folder(folder, "feature-extraction", data, **options)
    assert result.save_layout("hub") == Path("hub/openvino_model.xml")
    assert Path("hub/modules.json").is_file()
    model = openvino.Core().compile_model("hub/openvino_model.xml", "CPU")
    inputs = dict(transformers.AutoTokenizer.from_pretrained("hub")(["w1 w2"], return_tensors="np"))
    states = model({port.any_name: inputs[port.any_name] for port in model.inputs})[0]
    pooled = states[0].mean(0)
    assert result("w1 w2") == pytest.approx(pooled / np.linalg.norm(pooled), abs=1e-4)


def test_a_decoder_is_tuned_on_a_text_and_continues_texts(folder_of):
    Path("text.txt").write_text(made.counted(np.random.default_rng(5), 60))
    folder = folder_of("decoder")
    options = {"runtime": "source", "accuracy_criterion": 0.1, "exit_policy": {"max_trials": 3}}
    result = neural_mp.tune_folder(folder, "text-generation", "text.txt", "out", **options)
    assert result.report.metric == "Perplexity"
    written = neural_mp.load("out")("w3 w4 w5", max_new_tokens=3)
    assert written == result("w3 w4 w5", max_new_tokens=3)


def test_the_command_line_tunes_a_folder(folder_of):
    data = rows(made.opinions)
    folder = folder_of("text_classifier")
    arguments = ["tune", str(folder), "--task", "text-classification", "--data", str(data)]
    settings = ["--runtime", "source", "--precisions", "int8", "--max-trials", "2", "-o", "out"]
    outcome = CliRunner().invoke(app, [*arguments, *settings, "--quiet"])
    assert outcome.exit_code == 0, outcome.output
    assert neural_mp.load("out")("w1 bad")["label"] == "bad"


def test_calibration_data_columns_and_metrics_can_be_set(folder_of):
    random = np.random.default_rng(5)
    for name in ("test.csv", "train.csv"):
        lines = [f"{r['text']},{int(r['label'] == 'good')}" for r in made.opinions(random, 24)]
        Path(name).write_text("\n".join(["words,stars", *lines]))
    result = neural_mp.tune_folder(
        folder_of("text_classifier"),
        "text-classification",
        "test.csv",
        calibration="train.csv",
        columns={"text": "words", "label": "stars"},
        metric="F1",
        batch_size=8,
        **QUICK,
    )
    assert result.report.metric == "F1"
    assert result.met
