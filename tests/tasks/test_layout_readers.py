"""Layouts are read by the tools that they are for, each in an environment of its own.

`NEURAL_MP_READER_PYTHON` names an interpreter with sentence-transformers and optimum-onnx (which
needs an older transformers), `NEURAL_MP_NODE_MODULES` a folder in which `npm install
@huggingface/transformers` ran.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers")
pytest.importorskip("onnxruntime")
import task_folders as made

import neural_mp

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]
PYTHON = os.environ.get("NEURAL_MP_READER_PYTHON")
NODE = os.environ.get("NEURAL_MP_NODE_MODULES")
with_python = pytest.mark.skipif(not PYTHON, reason="NEURAL_MP_READER_PYTHON is not set")
with_node = pytest.mark.skipif(
    not NODE or shutil.which("node") is None, reason="NEURAL_MP_NODE_MODULES is not set, or no node"
)
OPTIONS = {"runtime": "onnxrt", "precisions": "int8", "exit_policy": {"max_trials": 2}}
TEXTS = ["w1 good w2 w3", "awful w4"]

OPTIMUM = """
import json, sys
from optimum.onnxruntime import ORTModelForSequenceClassification
from transformers import AutoTokenizer, pipeline
folder, texts = sys.argv[1], json.loads(sys.argv[2])
model = ORTModelForSequenceClassification.from_pretrained(
    folder, subfolder="onnx", file_name="model_quantized.onnx"
)
tokenizer = AutoTokenizer.from_pretrained(folder)
print(json.dumps(pipeline("text-classification", model=model, tokenizer=tokenizer)(texts)))
"""
SENTENCES = """
import json, sys
from sentence_transformers import SentenceTransformer
folder, texts = sys.argv[1], json.loads(sys.argv[2])
options = {"file_name": "onnx/model_quantized.onnx", "provider": "CPUExecutionProvider"}
model = SentenceTransformer(folder, backend="onnx", model_kwargs=options)
print(json.dumps(model.encode(texts).tolist()))
"""
JAVASCRIPT = """
import { pipeline, env } from '@huggingface/transformers';
const [task, folder, name, texts] = process.argv.slice(2);
env.allowRemoteModels = false;
env.localModelPath = folder;
const call = await pipeline(task, name, { dtype: 'q8' });
const pooled = { pooling: 'mean', normalize: true };
const result = await call(JSON.parse(texts), task === 'feature-extraction' ? pooled : {});
console.log(JSON.stringify(result.tolist ? result.tolist() : result));
"""


def read_with(*command, **options):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "USE_TF": "0"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, check=False, **options
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def classifier(folder_of, tmp_path, monkeypatch):
    """A tuned classifier, and the folder `hub` with its layout."""
    monkeypatch.chdir(tmp_path)
    data = made.write_rows(Path("data.jsonl"), made.opinions(np.random.default_rng(5), 48))
    folder = folder_of("text_classifier")
    result = neural_mp.tune_folder(folder, "text-classification", data, **OPTIONS)
    result.save_layout("hub")
    return result


@pytest.fixture
def encoder(folder_of, tmp_path, monkeypatch):
    """A tuned sentence encoder, and the folder `hub` with its layout."""
    monkeypatch.chdir(tmp_path)
    texts = [{"text": row["sentence1"]} for row in made.alike(np.random.default_rng(5), 32)]
    data = made.write_rows(Path("data.jsonl"), texts)
    folder = folder_of("sentence_encoder")
    result = neural_mp.tune_folder(folder, "feature-extraction", data, **OPTIONS)
    result.save_layout("hub")
    return result


def assert_equal_answers(actual, expected):
    assert [answer["label"] for answer in actual] == [answer["label"] for answer in expected]
    scores = [answer["score"] for answer in expected]
    assert [answer["score"] for answer in actual] == pytest.approx(scores, abs=0.02)


@with_python
def test_optimum_reads_a_classifier(classifier):
    answers = read_with(PYTHON, "-c", OPTIMUM, "hub", json.dumps(TEXTS))
    assert_equal_answers(answers, classifier(TEXTS))


@with_python
def test_sentence_transformers_reads_an_encoder_with_its_pooling(encoder):
    vectors = read_with(PYTHON, "-c", SENTENCES, "hub", json.dumps(["w1 w2", "w3"]))
    assert vectors == pytest.approx(encoder(["w1 w2", "w3"]), abs=0.02)


@with_node
def test_transformers_js_reads_a_classifier(classifier):
    assert_equal_answers(_read_in_javascript("text-classification", TEXTS), classifier(TEXTS))


@with_node
def test_transformers_js_reads_an_encoder(encoder):
    vectors = _read_in_javascript("feature-extraction", ["w1 w2", "w3"])
    assert np.array(vectors) == pytest.approx(encoder(["w1 w2", "w3"]), abs=0.02)


def _read_in_javascript(task, texts):
    script = Path(str(NODE)) / "read_layout.mjs"  # modules are looked up from the script
    script.write_text(JAVASCRIPT)
    return read_with("node", script.name, task, f"{Path.cwd()}/", "hub", json.dumps(texts),
                     cwd=NODE)  # fmt: skip


def test_the_class_of_a_tokenizer_is_one_that_older_versions_know(classifier):
    settings = json.loads(Path("hub/tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
