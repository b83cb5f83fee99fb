"""Results of transformers models: metrics of a trainer, pipelines."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ModelLoadError
from neural_mp.metrics import convert_to_metric

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("quick_runs")

WORDS = [f"w{number}" for number in range(40)]


@pytest.fixture(scope="module")
def tokenizer():
    backend = Tokenizer(WordLevel({token: n for n, token in enumerate(WORDS)}, unk_token="w0"))
    backend.pre_tokenizer = Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="w1")


@pytest.fixture(scope="module")
def classifier():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        id2label={0: "no", 1: "yes"},
    )
    return transformers.BertForSequenceClassification(config).eval()


def compute_metrics(eval_pred):
    """As in the documentation of the trainer of transformers."""
    logits, labels = eval_pred
    assert isinstance(logits, np.ndarray)
    assert logits.shape == (len(labels), 2)
    predictions = np.argmax(logits, axis=-1)
    return {"accuracy": float((predictions == labels).mean())}


def _tuned(model, batches, **options):
    converter = MixedPrecision(model=model, precisions="int8")
    converter.objective, converter.eval_dataloader = "modelsize", batches
    converter.accuracy_criterion = AccuracyCriterion(10, any_tolerance=True)
    for name, value in options.items():
        setattr(converter, name, value)
    return converter()


@pytest.fixture(scope="module")
def tuned(classifier):
    ids = torch.randint(0, 40, (16, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids[:, 0] % 2}
    return _tuned(classifier, [batch], metric=compute_metrics)


@pytest.mark.slow
def test_compute_metrics_gets_what_the_trainer_gives(tuned):
    assert tuned.report.metric == "compute_metrics"
    assert set(tuned.plan.counts()) >= {"int8"}


def test_several_outputs_are_a_tuple_and_the_loss_is_left_out():
    received = []

    def compute(eval_pred):
        received.append(eval_pred)
        return 1.0

    metric = convert_to_metric(compute)
    outputs = {"loss": np.ones(3), "start": np.zeros((3, 4)), "end": np.ones((3, 4))}
    metric.update(outputs, {"first": np.zeros(3), "second": np.ones(3)})
    metric.result()
    start, end = received[0].predictions
    assert (start.shape, end.shape) == ((3, 4), (3, 4))
    assert end.all()
    assert len(received[0].label_ids) == 2


@pytest.mark.slow
def test_a_pipeline_runs_a_result_with_the_labels_of_its_configuration(tuned, tokenizer):
    assert tuned.config.id2label == {0: "no", 1: "yes"}
    assert tuned.device == torch.device("cpu")
    pipeline = transformers.pipeline("text-classification", model=tuned, tokenizer=tokenizer)
    (prediction,) = pipeline("w3 w4 w5")
    inputs = tokenizer("w3 w4 w5", return_tensors="pt")
    logits = tuned(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits
    expected = torch.softmax(logits[0], -1)
    assert prediction["label"] == ("no", "yes")[int(expected.argmax())]
    assert prediction["score"] == pytest.approx(float(expected.max()), rel=1e-4)


@pytest.mark.slow
def test_a_loaded_result_keeps_its_configuration(tuned, tokenizer, tmp_path):
    tuned.save(tmp_path / "saved")
    loaded = neural_mp.load(tmp_path / "saved")
    assert type(loaded.config) is transformers.BertConfig
    assert loaded.config.to_dict() == tuned.config.to_dict()
    text = "w3 w4 w5"
    first, second = (
        transformers.pipeline("text-classification", model=model, tokenizer=tokenizer)(text)
        for model in (tuned, loaded)
    )
    assert first == second
    loaded.save(tmp_path / "again")  # A configuration that nothing asked for is saved, too.
    assert neural_mp.load(tmp_path / "again").config.id2label == {0: "no", 1: "yes"}


def _saved_with_config(result, folder, entries):
    """Return the folder of a result whose configuration was edited, with the digest of the edit."""
    saved = folder / "saved"
    result.save(saved)
    details = json.loads((saved / "details.json").read_text())
    details["config"].update(entries)
    (saved / "details.json").write_text(json.dumps(details))
    (manifest_file,) = (f for f in saved.glob("*.json") if '"files"' in f.read_text())
    manifest = json.loads(manifest_file.read_text())
    manifest["files"]["details.json"] = hashlib.sha256(
        (saved / "details.json").read_bytes()
    ).hexdigest()
    manifest_file.write_text(json.dumps(manifest))
    return saved


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("num_hidden_layers", 10**9, "num_hidden_layers must be at most"),
        ("num_labels", 10**9, "num_labels must be at most"),
        ("attn_implementation", "them/kernel", "names the kernel"),
    ],
)
def test_a_stored_configuration_is_checked_like_a_folder(tuned, tmp_path, entry, value, message):
    saved = _saved_with_config(tuned, tmp_path, {entry: value})
    with pytest.raises(ModelLoadError, match=message):
        neural_mp.load(saved)


@pytest.mark.slow
def test_a_stored_configuration_of_an_unknown_model_is_one_error(tuned, tmp_path):
    entries = {"model_type": "bert-of-tomorrow", "auto_map": {"AutoModel": "them/code.M"}}
    loaded = neural_mp.load(_saved_with_config(tuned, tmp_path, entries))
    with pytest.raises(ModelLoadError, match="must have models of type 'bert-of-tomorrow'"):
        loaded.config  # noqa: B018


@pytest.mark.slow
def test_a_decoder_converted_layer_by_layer_writes_text_in_a_pipeline(tokenizer):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
    )
    decoder = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(2, 40, (4, 8))
    batches = [({"input_ids": ids}, ids)]
    result = _tuned(decoder, batches, capture="layers", metric="perplexity")
    assert result.can_generate()
    pipeline = transformers.pipeline("text-generation", model=result, tokenizer=tokenizer)
    (generated,) = pipeline("w3 w4", max_new_tokens=4, do_sample=False)
    assert generated["generated_text"].startswith("w3 w4")
    assert len(generated["generated_text"].split()) > 2


def test_other_attributes_are_missing_as_ever(tuned):
    with pytest.raises(AttributeError, match="no attribute 'sav'; did you mean 'save'"):
        tuned.sav  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'generate'"):
        tuned.generate  # noqa: B018
