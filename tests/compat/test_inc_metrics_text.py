"""Metrics over text, named in a file of Intel Neural Compressor."""

import math

import numpy as np
import pytest
from sklearn.metrics import accuracy_score, matthews_corrcoef

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.errors import MetricError
from neural_mp.metrics import build_metric


def named(name, options=None, framework="tensorflow"):
    return build_metric(name, options, load_vocabulary(framework).metrics)


@pytest.mark.parametrize("task", ["mrpc", "qqp", "qnli", "rte", "mnli", "wnli", "sst-2", "cola"])
def test_glue_measures_each_task_of_classes_as_it_should(task):
    random = np.random.default_rng(0)
    scores, labels = random.normal(size=(60, 3)), random.integers(3, size=60)
    metric = named("GLUE", {"task": task}, "onnxrt")
    metric.update([scores[:40]], [labels[:40]])
    metric.update(scores[40:], labels[40:, None])
    measure = matthews_corrcoef if task == "cola" else accuracy_score
    assert metric.result() == pytest.approx(measure(labels, scores.argmax(axis=1)))


def test_glue_measures_similarities_by_two_correlations():
    from scipy.stats import pearsonr, spearmanr  # the import takes most of a second

    random = np.random.default_rng(0)
    labels = random.normal(size=30)
    scores = labels[:, None] ** 3 + random.normal(size=(30, 1))
    metric = named("GLUE", {"task": "sts-b"}, "onnxrt")
    metric.update([scores[:1]], [labels[:1]])
    with pytest.raises(MetricError, match="at least two samples"):
        metric.result()
    metric.update([scores[1:]], [labels[1:]])
    total = pearsonr(scores[:, 0], labels)[0] + spearmanr(scores[:, 0], labels)[0]
    assert metric.result() == pytest.approx(total / 2)


def test_glue_starts_anew_after_a_reset():
    metric = named("GLUE", {"task": "mrpc"}, "onnxrt")
    metric.update(np.eye(2), np.array([1, 0]))
    metric.reset()
    metric.update(np.eye(2), np.array([0, 0]))
    assert metric.result() == 0.5


def test_glue_says_which_form_a_task_needs():
    with pytest.raises(
        MetricError, match=r"'mrpc', predictions must be scores \[N, C\] for labels \[N\]"
    ):
        named("GLUE").update(np.zeros(4), np.zeros(4))
    with pytest.raises(MetricError, match="'sts-b', predictions must be one number for each label"):
        named("GLUE", {"task": "sts-b"}).update(np.zeros((4, 2)), np.zeros(4))
    with pytest.raises(MetricError, match="no result before"):
        named("GLUE").result()


def articles(**answers):
    questions = [
        {
            "id": name,
            "question": "?",
            "answers": [{"text": right, "answer_start": 0} for right in texts],
        }
        for name, texts in answers.items()
    ]
    return [{"title": "t", "paragraphs": [{"context": "c", "qas": questions}]}]


def test_squad_f1_takes_the_best_of_the_right_answers():
    metric = named("SquadF1")
    labels = articles(
        first=["Denver Broncos", "the Broncos!"], second=["gold"], third=["in 2016", "2016"]
    )
    metric.update({"first": "A broncos", "second": "blue", "third": "in early 2016"}, labels)
    # 1 for the first, whose article and mark do not count; 0; 2 words of 3, both that are wanted.
    assert metric.result() == pytest.approx(100 * (1 + 0 + 2 / (1 + 3 / 2)) / 3)


def test_squad_f1_waits_for_the_answers_of_the_postprocess_transform():
    metric = named("SquadF1")
    metric.update(None, None)
    metric.update({}, articles(q=["x"]))
    assert metric.result() == 0.0
    metric.update({"q": "x"}, {"data": articles(q=["x"]), "version": "1.1"})
    assert metric.result() == 100.0
    metric.reset()
    assert metric.result() == 0.0


def test_a_question_without_an_answer_scores_zero():
    metric = named("SquadF1")
    metric.update({"q": "x"}, articles(q=["x"], other=["y"]))
    assert metric.result() == 50.0


@pytest.mark.parametrize("labels", [[1, 2], [{"paragraphs": [{"qas": [{"id": "q"}]}]}], None])
def test_squad_f1_says_what_labels_it_takes(labels):
    with pytest.raises(MetricError, match="under 'data' of a SQuAD 1.1 file"):
        named("SquadF1").update({"q": "x"}, labels)


def test_squad_f1_says_what_predictions_it_takes():
    with pytest.raises(MetricError, match="add the postprocess transform SquadV1"):
        named("SquadF1").update([np.zeros((3, 384))], articles(q=["x"]))
    with pytest.raises(MetricError, match="must hold a question"):
        named("SquadF1").update({"q": "x"}, [])


def bleu(translations, references):
    metric = named("BLEU")
    metric.update(translations, references)
    return metric.result()


def test_bleu_counts_runs_of_words_by_hand():
    assert bleu(["The cat sat"], ["the cat sat on"]) == pytest.approx(100 * math.exp(1 - 4 / 3))
    # Runs that are right: 2 of 4 words, 1 of 3 pairs, none of 2 triples, none of 1 quadruple.
    right = (2 / 4) * (1 / 3) * (0.5 / 2) * (0.25 / 1)
    assert bleu(["a b c d"], ["a b x y"]) == pytest.approx(100 * right ** (1 / 4))
    # A word counts no more often than the reference has it.
    clipped = (1 / 2) * (0.5 / 1)
    assert bleu(["the the"], ["the"]) == pytest.approx(100 * clipped ** (1 / 4))
    assert bleu([""], ["word"]) == 0.0


def test_bleu_sets_punctuation_and_symbols_apart():
    same = ["„It costs $ 3.5 , or 1,000 ?“ he said\\ .", "„ It costs $3.5, or 1,000? “ he said\\."]
    assert bleu(same[:1], same[1:]) == pytest.approx(100)
    assert bleu(["it is 1 , 000"], ["it is 1,000"]) < 100


def test_bleu_adds_up_all_sentences_before_it_divides():
    metric = named("BLEU")
    metric.update(["a b c d e"], ("a b c d e",))
    metric.update(np.array(["x"]), [b"y"])
    right = (5 / 6) * (4 / 4) * (3 / 3) * (2 / 2)
    assert metric.result() == pytest.approx(100 * right ** (1 / 4))


def test_bleu_gives_the_values_that_are_published_for_it():
    # Source: test/metric/test_metrics.py of Intel Neural Compressor 1.14.
    score = bleu(
        ["Gutach: Mehr Sicherheit für Fußgänger"], ("Gutach: Noch mehr Sicherheit für Fußgänger",)
    )
    assert score == pytest.approx(51.1507809)
    score = bleu(
        ["Dies wurde auch von Peter Arnold vom Offenburg District Office bestätigt."],
        ("Dies bestätigt auch Peter Arnold vom Landratsamt Offenburg.",),
    )
    assert score == pytest.approx(16.108992695)


def test_bleu_says_what_it_takes():
    with pytest.raises(MetricError, match="2 translations and 1 references"):
        named("BLEU").update(["a", "b"], ["c"])
    with pytest.raises(MetricError, match="predictions must be a list of strings"):
        named("BLEU").update(np.zeros((2, 3)), ["a", "b"])
    with pytest.raises(MetricError, match="no result before"):
        named("BLEU").result()
