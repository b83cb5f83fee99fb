"""Metrics of texts, spans, rankings and similarities, compared with other libraries."""

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import (
    label_ranking_average_precision_score,
    ndcg_score,
    top_k_accuracy_score,
)
from sklearn.metrics.pairwise import cosine_similarity

from neural_mp.errors import ConfigurationError, MetricError, MissingFrameworkError
from neural_mp.metrics import build_metric, convert_to_metric
from neural_mp.metrics.texts import find_spans

OF_TEXTS = ["wer", "cer", "bleu", "rouge", "exact_match", "answer_f1"]
PACKAGES = {"wer": "jiwer", "cer": "jiwer", "bleu": "sacrebleu", "rouge": "rouge_score"}
GENERATOR = np.random.default_rng(0)
PREDICTED = ["the cat sat on mat", "a dog", "hello there world", "numbers 1 2 4"]
RIGHT = ["the cat sat on the mat", "the dog barks", "hello world", "numbers 1 2 3"]


def value(metric, preds, labels, batch=2):
    """The result for batches, so that accumulation is part of every comparison."""
    metric = convert_to_metric(metric)
    metric.reset()
    for start in range(0, len(preds), batch):
        stop = start + batch
        part = (
            {key: column[start:stop] for key, column in labels.items()}
            if isinstance(labels, dict)
            else labels[start:stop]
        )
        metric.update(preds[start:stop], part)
    return metric.result()


@pytest.mark.parametrize(("name", "reference"), [("spearman", spearmanr), ("pearson", pearsonr)])
def test_correlations_are_those_of_scipy(name, reference):
    labels = GENERATOR.normal(size=50).round(1)
    scores = (labels**3 + GENERATOR.normal(size=50)).astype(np.float32)
    assert value(name, scores, labels) == pytest.approx(reference(scores, labels).statistic)
    assert np.isnan(value(name, np.zeros(50), labels))


def test_pairs_of_rows_are_scored_by_their_cosine():
    rows, labels = GENERATOR.normal(size=(20, 8)), GENERATOR.normal(size=10)
    cosines = np.diag(cosine_similarity(rows[::2], rows[1::2]))
    expected = spearmanr(cosines, labels).statistic
    metric = ("spearman", {"pairs": True})
    assert value(metric, rows, np.repeat(labels, 2)) == pytest.approx(expected)
    with pytest.raises(MetricError, match=r"pairs requires embeddings \[2N, D\]"):
        value(metric, rows[:3], labels[:3], batch=3)


def test_cosine_compares_with_the_fp32_model_row_by_row():
    rows, reference = GENERATOR.normal(size=(2, 6, 3, 5))
    metric = build_metric("cosine")
    assert metric.compare_label is False
    expected = np.diag(cosine_similarity(rows.reshape(-1, 5), reference.reshape(-1, 5))).mean()
    assert value(metric, rows, reference) == pytest.approx(expected)
    rows[0, 0, 0] = np.nan
    assert np.isnan(value(metric, rows, reference))


@pytest.mark.parametrize("k", [1, 3, None])
def test_ndcg_is_that_of_scikit_learn(k):
    scores, relevance = GENERATOR.normal(size=(9, 6)), GENERATOR.integers(4, size=(9, 6))
    scores[:, 3] = scores[:, 2]  # ties
    expected = ndcg_score(relevance, scores, k=k)
    name = "ndcg" if k is None else f"ndcg@{k}"
    assert value(name, scores, relevance) == pytest.approx(expected)
    # The same documents as single pairs, each query in several batches.
    pairs = {"query": np.repeat(np.arange(9), 6), "relevance": relevance.reshape(-1)}
    assert value(name, scores.reshape(-1), pairs, batch=4) == pytest.approx(expected)


def test_reciprocal_ranks_and_recall_are_those_of_scikit_learn_for_one_right_document():
    scores, right = GENERATOR.normal(size=(40, 7)), GENERATOR.integers(7, size=40)
    relevance = np.eye(7)[right]
    expected = label_ranking_average_precision_score(relevance, scores)
    assert value("mrr", scores, relevance) == pytest.approx(expected)
    expected = top_k_accuracy_score(right, scores, k=3)
    assert value("recall@3", scores, relevance) == pytest.approx(expected)
    assert value("MRR@1", scores, relevance) == pytest.approx(np.mean(scores.argmax(1) == right))


def test_recall_counts_all_relevant_documents():
    relevance, scores = np.array([[1, 0, 2, 1], [0, 0, 0, 0]]), np.array([[4.0, 3, 2, 1]] * 2)
    assert value("recall@3", scores, relevance) == pytest.approx((2 / 3 + 0) / 2)


def test_a_ranking_of_wrong_labels_is_refused():
    with pytest.raises(MetricError, match="the keys query and relevance, got kind"):
        value("mrr", np.zeros(2), {"kind": np.zeros(2)})
    with pytest.raises(MetricError, match="the relevance must be at least 0, got -1"):
        value("mrr", np.zeros((2, 2)), np.array([[1, -1], [0, 1]]))
    with pytest.raises(ConfigurationError, match="k"):
        build_metric("recall@0")


@pytest.mark.parametrize("name", ["wer", "cer"])
def test_error_rates_are_those_of_jiwer(name):
    jiwer = pytest.importorskip("jiwer")
    metric = build_metric(name)
    assert metric.higher_is_better is False
    assert value(metric, PREDICTED, RIGHT) == pytest.approx(getattr(jiwer, name)(RIGHT, PREDICTED))
    with pytest.raises(MetricError, match="got 2 texts and 1 references"):
        metric.update(["a", "b"], ["a"])


def test_bleu_is_that_of_sacrebleu_with_one_or_several_references():
    sacrebleu = pytest.importorskip("sacrebleu")
    expected = sacrebleu.corpus_bleu(PREDICTED, [RIGHT]).score
    assert 0 < expected < 100
    assert value("bleu", PREDICTED, RIGHT) == pytest.approx(expected)
    several = [[text, "something else"] for text in RIGHT]
    expected = sacrebleu.corpus_bleu(PREDICTED, [RIGHT, ["something else"] * 4]).score
    assert value("bleu", PREDICTED, several) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["rouge1", "rouge2", "rougeL"])
def test_rouge_is_that_of_rouge_score(kind):
    scorer = pytest.importorskip("rouge_score.rouge_scorer").RougeScorer([kind])
    scores = [scorer.score(r, p)[kind].fmeasure for r, p in zip(RIGHT, PREDICTED, strict=True)]
    assert value(("rouge", {"kind": kind}), PREDICTED, RIGHT) == pytest.approx(np.mean(scores))


def test_answers_count_as_in_squad():
    answers, right = (
        ["The Eiffel Tower!", "in 1999", "blue"],
        [["eiffel tower"], ["1998", "1999"], ["red"]],
    )
    assert value("exact_match", answers, right) == pytest.approx(1 / 3)
    assert value("answer_f1", answers, right) == pytest.approx((1 + 2 / 3 + 0) / 3)
    assert value(
        ("exact_match", {"normalize": False}), answers, [["The Eiffel Tower!"], *right[1:]]
    ) == pytest.approx(1 / 3)


#: Tags and the spans that conlleval and seqeval read.
TAGGED = [
    ("B-A I-A O B-B", [("A", 0, 2), ("B", 3, 4)]),
    ("B-A B-A I-B", [("A", 0, 1), ("A", 1, 2), ("B", 2, 3)]),
    ("I-A I-A O I-A", [("A", 0, 2), ("A", 3, 4)]),
    ("S-A B-A E-A I-A", [("A", 0, 1), ("A", 1, 3), ("A", 3, 4)]),
    ("O O", []),
    ("A A B O", [("A", 0, 2), ("B", 2, 3)]),
]


@pytest.mark.parametrize(("tags", "spans"), TAGGED)
def test_spans_are_read_as_by_conlleval(tags, spans):
    assert list(find_spans(tags.split())) == spans


def test_span_f1_counts_whole_spans_and_no_ignored_tokens():
    names = ["O", "B-A", "I-A"]
    truth = np.array([[1, 2, 0, -100], [0, 1, -100, -100]])
    classes = np.array([[1, 2, 0, 1], [1, 1, 0, 0]])
    # Spans: (A, 0, 2) is common; predicted are also (A, 0, 1), (A, 1, 2); true is (A, 1, 2).
    expected = 2 * 2 / (3 + 2)
    metric = ("span_f1", {"names": names})
    assert value(metric, np.eye(3)[classes], truth) == pytest.approx(expected)
    assert value(metric, classes, truth) == pytest.approx(expected)
    tags = [[names[i] for i in row] for row in ([1, 2, 0], [1, 1])]
    right = [[names[i] for i in row] for row in ([1, 2, 0], [0, 1])]
    assert value("span_f1", tags, right) == pytest.approx(expected)
    with pytest.raises(MetricError, match="set the option names"):
        value("span_f1", classes, truth)


def test_token_ids_are_decoded_by_the_tokenizer_of_a_folder(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("jiwer")
    vocabulary = {
        token: i for i, token in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abc"])
    }
    (tmp_path / "vocab.json").write_text(str(vocabulary).replace("'", '"'))
    transformers.Wav2Vec2CTCTokenizer(str(tmp_path / "vocab.json")).save_pretrained(tmp_path)
    # Blanks separate repeated letters: "aab c".
    ids = np.array([[5, 5, 0, 5, 6, 4, 7, 0]])
    metric = ("cer", {"tokenizer": str(tmp_path)})
    assert value(metric, np.eye(8, dtype=np.float32)[ids], ["aab c"]) == 0
    # The labels of a trainer are token ids, in which nothing is merged.
    assert value(metric, np.eye(8)[ids], np.array([[5, 5, 6, 4, 7, -100]])) == 0
    with pytest.raises(MetricError, match="set the option tokenizer"):
        value("cer", ids, ["aab c"])


@pytest.mark.parametrize("name", [*OF_TEXTS, "cosine", "ndcg", "mrr", "recall@1", "span_f1"])
def test_there_is_no_result_before_the_first_sample(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    metric = build_metric(name)
    assert metric.higher_is_better is (name not in ("wer", "cer"))
    with pytest.raises(MetricError, match="has no result before the first sample"):
        metric.result()


@pytest.mark.parametrize(("name", "package"), [("wer", "jiwer"), ("bleu", "sacrebleu")])
def test_a_missing_package_is_named_with_its_extra(name, package, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, package, None)
    with pytest.raises(MissingFrameworkError, match=rf"{package}; install .*texts"):
        build_metric(name)


def test_metrics_of_texts_are_usable_in_a_tuning_file(tmp_path):
    from neural_mp.config import load_settings

    file = tmp_path / "conf.yaml"
    file.write_text("evaluation: {accuracy: {metric: {ndcg@5: {}}}}\n")
    assert load_settings(file).evaluation.metrics[0].name == "ndcg@5"
