"""Questions with several answers: dataset and metric, and tasks of lm-evaluation-harness."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from neural_mp import MixedPrecision
from neural_mp.data import build_dataloader, build_dataset
from neural_mp.errors import ConfigurationError, DataError, MetricError, MissingFrameworkError
from neural_mp.metrics import LMEvalTask, MultipleChoice, build_metric

WORDS = ["[UNK]", "[BOS]", "[EOS]", *(f"w{number}" for number in range(40))]
COUNT = 24


def _questions() -> list[dict[str, object]]:
    draw = np.random.default_rng(0)

    def text(count: int) -> str:
        return " ".join(f"w{number}" for number in draw.integers(40, size=count))

    questions = []
    for _ in range(COUNT):
        choices = [text(int(count)) for count in draw.integers(1, 5, size=int(draw.integers(2, 5)))]
        answer = int(draw.integers(len(choices)))
        questions.append({"question": text(4), "choices": choices, "answer": answer})
    return questions


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer that begins and ends texts with special tokens, and questions."""
    root = tmp_path_factory.mktemp("choices")
    tokenizer = Tokenizer(WordLevel({term: n for n, term in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    for name, template in (("begins", "[BOS] $A"), ("ends", "[BOS] $A [EOS]")):
        tokenizer.post_processor = TemplateProcessing(
            single=template, special_tokens=[("[BOS]", 1), ("[EOS]", 2)]
        )
        (root / name).mkdir()
        tokenizer.save(str(root / name / "tokenizer.json"))
    (root / "a.jsonl").write_text("\n".join(map(json.dumps, _questions())))
    return root


@pytest.fixture(scope="module")
def decoder():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.3,
    )
    return LlamaForCausalLM(config).eval()


def _scores(decoder, questions, normalized):
    """The share of right answers, each answer alone and without padding."""
    right = 0
    for entry in questions:
        context = [1, *(WORDS.index(term) for term in entry["question"].split())]
        scores = []
        for choice in entry["choices"]:
            answer = [WORDS.index(term) for term in choice.split()]
            with torch.inference_mode():
                logits = decoder(torch.tensor([context + answer])).logits[0]
            chances = logits.log_softmax(-1)[len(context) - 1 : -1]
            score = sum(float(chances[i, token]) for i, token in enumerate(answer))
            scores.append(score / len(choice) if normalized else score)
        right += int(np.argmax(scores)) == entry["answer"]
    return right / len(questions)


@pytest.mark.parametrize("tokenizer", ["begins", "ends"])
@pytest.mark.parametrize("normalized", [False, True])
def test_the_accuracy_is_that_of_answers_scored_one_by_one(folder, decoder, tokenizer, normalized):
    dataset = {"path": str(folder / "a.jsonl"), "tokenizer": str(folder / tokenizer)}
    loader = build_dataloader({"batch_size": 7, "dataset": {"multiple_choice": dataset}})
    parts = [build_metric("multiple_choice", {"normalized": normalized}) for _ in range(2)]
    for number, (inputs, labels) in enumerate(loader):
        with torch.inference_mode():
            preds = decoder(torch.from_numpy(inputs["input_ids"]))
        parts[number % 2].update(preds, labels)
    parts[0].merge(parts[1])
    expected = _scores(decoder, _questions(), normalized)
    assert parts[0].result() == pytest.approx(expected)
    assert 0 < expected < 1


def test_a_longer_question_loses_its_start(folder):
    options = {"path": str(folder / "a.jsonl"), "tokenizer": str(folder / "begins")}
    whole = build_dataset({"multiple_choice": options})
    short = build_dataset({"multiple_choice": {**options, "length": 4, "max_questions": 3}})
    assert len(short) == sum(len(entry["choices"]) for entry in _questions()[:3])
    for index in range(len(short)):
        (long_inputs, long_labels), (inputs, labels) = whole[index], short[index]
        used = int(np.flatnonzero(long_labels["tokens"] != -100)[-1]) + 1
        expected = long_inputs["input_ids"][:used][-4:]
        assert inputs["input_ids"][: len(expected)].tolist() == expected.tolist()
        actual = labels["tokens"][labels["tokens"] != -100].tolist()
        answer = long_labels["tokens"][long_labels["tokens"] != -100].tolist()
        assert actual == answer[-min(len(answer), 3) :]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ({"question": "w1", "choices": ["w1"], "answer": 0}, "two or more under 'choices'"),
        ({"question": " ", "choices": ["w1", "w2"], "answer": 0}, "must have a text under"),
        ({"question": "w1", "choices": ["w1", "w2"], "answer": 2}, "position from 0 to 1, got 2"),
        ({"question": "w1", "choices": ["w1", "w2"], "answer": "w3"}, "text of one of the answers"),
        ({"question": "w1", "choices": ["w1", "w2"]}, "under 'answer'"),
    ],
)
def test_a_line_that_is_no_question_is_named(folder, tmp_path, line, words):
    good = json.dumps({"question": "w1", "choices": ["w1", "w2"], "answer": "w2"})
    (tmp_path / "b.jsonl").write_text(f"{good}\n{json.dumps(line)}\n")
    options = {"path": str(tmp_path / "b.jsonl"), "tokenizer": str(folder / "begins")}
    with pytest.raises(DataError, match=f"b.jsonl, line 2, .*{words}"):
        build_dataset({"multiple_choice": options})
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match="must have a question, got none"):
        build_dataset({"multiple_choice": options})
    with pytest.raises(ConfigurationError, match="path must end in .jsonl"):
        build_dataset(
            {"multiple_choice": {**options, "path": str(folder / "begins/tokenizer.json")}}
        )


def test_answers_that_are_missing_and_labels_of_other_data_are_errors(folder):
    options = {"path": str(folder / "a.jsonl"), "tokenizer": str(folder / "begins")}
    inputs, label = build_dataset({"multiple_choice": options})[0]
    labels = {name: np.array([value]) for name, value in label.items()}
    logits = np.zeros((1, len(inputs["input_ids"]), len(WORDS)), np.float32)
    metric = MultipleChoice()
    with pytest.raises(MetricError, match="no result before the first sample"):
        metric.result()
    metric.update(logits, labels)
    with pytest.raises(MetricError, match="question 0 must have two answers or more"):
        metric.result()
    with pytest.raises(MetricError, match="use the dataset 'multiple_choice'"):
        metric.update(logits, labels["tokens"])


def _converter(decoder, tmp_path, precisions):
    """A search for the smallest decoder that keeps four fifths of the accuracy."""
    converter = MixedPrecision(workspace=tmp_path / "workspace", precisions=precisions)
    converter.model, converter.capture, converter.objective = decoder, "layers", "modelsize"
    converter.accuracy_criterion = {"relative": 0.2}
    return converter


def _assert_met(result, metric, decoder):
    assert result.met
    assert result.report.metric == metric
    assert result.report.baseline_accuracy == pytest.approx(
        _scores(decoder, _questions(), normalized=False)
    )


@pytest.mark.slow
def test_a_decoder_is_tuned_by_its_answers(folder, decoder, tmp_path):
    options = {"path": str(folder / "a.jsonl"), "tokenizer": str(folder / "begins")}
    loader = build_dataloader({"batch_size": 8, "dataset": {"multiple_choice": options}})
    converter = _converter(decoder, tmp_path, "int8,int4")
    converter.metric, converter.eval_dataloader = "multiple_choice", loader
    result = converter()
    _assert_met(result, "MultipleChoice", decoder)
    assert result.plan.counts()


TASK = """
task: digits_of_words
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""


@pytest.mark.slow
def test_a_task_of_the_harness_has_the_accuracy_of_the_dataset(folder, decoder, tmp_path):
    tasks = pytest.importorskip("lm_eval.tasks")
    (tmp_path / "task.yaml").write_text(TASK.format(file=folder / "a.jsonl"))
    manager = tasks.TaskManager(include_path=str(tmp_path), include_defaults=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "begins" / "tokenizer.json"),
        bos_token="[BOS]",
        eos_token="[EOS]",
    )
    for metric, normalized in (("acc", False), ("acc_norm", True)):
        task = LMEvalTask("digits_of_words", tokenizer, metric, options={"task_manager": manager})
        assert task(decoder) == pytest.approx(_scores(decoder, _questions(), normalized))
    converter = _converter(decoder, tmp_path, "int8")
    converter.calib_dataloader = [{"input_ids": torch.randint(len(WORDS), (4, 8))}]
    converter.eval_func = LMEvalTask(
        "digits_of_words", tokenizer, options={"task_manager": manager}
    )
    _assert_met(converter(), "acc of digits_of_words", decoder)
    with pytest.raises(MetricError, match=r"one of the task 'digits_of_words' \(acc, acc_norm\)"):
        LMEvalTask("digits_of_words", tokenizer, "f1", options={"task_manager": manager})(decoder)


def test_a_task_has_a_name_and_a_direction_and_needs_its_package(decoder, monkeypatch):
    task = LMEvalTask(["arc_easy", "piqa"], "folder", "acc_norm")
    assert task.__name__ == "acc_norm of arc_easy, piqa"
    assert task.higher_is_better
    assert not LMEvalTask("wikitext", "folder", "word_perplexity").higher_is_better
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install 'lm-eval\[hf\]'"):
        task(decoder)
    with pytest.raises(ConfigurationError, match="at least one task"):
        LMEvalTask((), "folder")(decoder)
