"""From scores on windows of text to answers."""

import json

import numpy as np
import pytest

from neural_mp.compat.inc.components import load_vocabulary
from neural_mp.core.criterion import Deadline
from neural_mp.data import build_transforms
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.evaluator import Evaluator

pytest.importorskip("tokenizers")
FIRST = 1_000_000_000
TEXT = "Zoë's  river (the Rhône) is 812 km long.\u202fIt rises in Valais, and ends near Arles."
QUESTIONS = ["How long is it?", "Where does it rise?"]
WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "zoe",
    "'",
    "s",
    "river",
    "(",
    "the",
    "rhone",
    ")",
    "is",
    "812",
    "km",
    "long",
    ".",
    "it",
    "rises",
    "in",
    "valais",
    ",",
    "and",
    "ends",
    "near",
    "ar",
    "##les",
    "how",
    "?",
    "where",
    "does",
    "rise",
]


@pytest.fixture
def files(tmp_path):
    questions = [{"id": f"q{n}", "question": question} for n, question in enumerate(QUESTIONS)]
    data = {"data": [{"paragraphs": [{"context": TEXT, "qas": questions}]}]}
    (tmp_path / "dev.json").write_text(json.dumps(data))
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    return {
        "label_file": str(tmp_path / "dev.json"),
        "vocab_file": str(tmp_path / "vocab.txt"),
        "max_seq_length": 24,
        "doc_stride": 8,
    }


def made(name, **options):
    return load_vocabulary("tensorflow").transforms.build(name, options)


def scores_for(transform, answers):
    """Scores that are highest where an answer's pieces lie, in every window that shows them all."""
    count, length = len(transform.task.windows), 24
    starts, ends = np.zeros((2, count, length), dtype=np.float32)
    for number, window in enumerate(transform.task.windows):
        pieces = list(window.pieces)
        answer = answers[window.question]
        for position in range(window.first, len(pieces) - len(answer) + 1):
            if pieces[position : position + len(answer)] == answer:
                starts[number, position] = ends[number, position + len(answer) - 1] = 9
    return starts, ends


def test_a_text_is_cut_into_windows_that_overlap(files):
    windows = made("SquadV1", **files).task.windows
    first = windows[0]
    assert first.pieces[:7] == ("[CLS]", "how", "long", "is", "it", "?", "[SEP]")
    assert len(first.pieces) == 24
    assert first.pieces[7:12] == ("zoe", "'", "s", "river", "(")
    own = [window for window in windows if window.question == 0]
    assert own[1].pieces[7] == first.pieces[7 + 8]
    assert own[-1].pieces[-1] == "[SEP]"
    assert own[-1].pieces[-4:-1] == ("ar", "##les", ".")


def test_answers_are_given_as_they_stand_in_the_text(files):
    transform = made("SquadV1", **files)
    starts, ends = scores_for(transform, [["rhone"], ["ar", "##les"]])
    numbers = [FIRST + number for number in range(len(starts))]
    predictions, labels = transform(([numbers, list(starts), list(ends)], "labels"))
    assert predictions == {"q0": "Rhône", "q1": "Arles"}
    assert labels == "labels"


def test_an_answer_must_not_be_too_long_nor_end_before_it_starts(files):
    transform = made("SquadV1", **files, max_answer_length=2, n_best_size=1)
    starts, ends = scores_for(transform, [["812", "km", "long"], ["valais"]])
    numbers = [FIRST + number for number in range(len(starts))]
    predictions, _ = transform(([numbers, list(starts), list(ends)], None))
    assert predictions == {"q0": "empty", "q1": "Valais"}


def test_questions_whose_windows_were_not_seen_are_skipped(files):
    transform = made("SquadV1", **files)
    starts, ends = scores_for(transform, [["rhone"], ["valais"]])
    of_first = [n for n, window in enumerate(transform.task.windows) if window.question == 0]
    batch = ([FIRST + n for n in of_first], starts[of_first], ends[of_first])
    predictions, _ = transform((batch, None))
    assert predictions == {"q0": "Rhône", "q1": "*#skip this example#*"}


def test_batches_are_held_back_until_all_are_there(files):
    transform = made("SquadV1ModelZoo", **files)
    starts, ends = scores_for(transform, [["812", "km"], ["valais"]])
    half = len(starts) // 2
    assert transform(((starts[:half], ends[:half]), "a")) == (None, None)
    padded = [np.concatenate([scores[half:], scores[:1]]) for scores in (starts, ends)]
    assert transform((padded, "b")) == ({"q0": "812 km", "q1": "Valais"}, "b")
    assert transform(((starts[:half], ends[:half]), "a")) == (None, None)
    transform.reset()
    assert transform(((starts, ends), "c"))[0] == {"q0": "812 km", "q1": "Valais"}


def test_collected_scores_go_on_to_the_answers(files):
    count = len(made("SquadV1", **files).task.windows)
    pipeline = build_transforms(
        {"Collect": {"length": count}, "SquadV1": files}, load_vocabulary("tensorflow")
    )
    starts, ends = scores_for(made("SquadV1", **files), [["rhone"], ["arles"]])
    scores = np.stack([starts, ends], axis=-1)
    assert pipeline((scores[:1], None)) == (None, None)
    pipeline.reset()
    predictions, _ = pipeline((scores, None))
    assert predictions["q0"] == "Rhône"


class Answered:
    higher_is_better = True

    def reset(self):
        self.answers = {}

    def update(self, preds, labels):
        self.answers = preds or self.answers

    def result(self):
        return float(len(self.answers))


def test_each_evaluation_begins_with_the_first_window(files):
    transform = made("SquadV1ModelZoo", **files)
    starts, ends = scores_for(transform, [["812", "km"], ["valais"]])
    transform(((starts[:1], ends[:1]), None))  # what an evaluation that was cut short left behind
    evaluator = Evaluator(
        Batches([((starts, ends), np.zeros(len(starts)))], "the windows"),
        ((Answered(), 1.0),),
        postprocess=transform,
    )
    for _ in range(2):
        assert evaluator(lambda inputs: inputs, Deadline(60)) == 2.0


def test_mistakes_are_named(files, tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        made("SquadV1", **{**files, "vocab_file": str(tmp_path / "other.txt")})
    (tmp_path / "words.txt").write_text("one\ntwo\n")
    with pytest.raises(DataError, match="UNK"):
        made("SquadV1", **{**files, "vocab_file": str(tmp_path / "words.txt")})
    with pytest.raises(DataError, match="cannot be read as JSON"):
        _ = made("SquadV1", **{**files, "label_file": files["vocab_file"]}).task.questions
    with pytest.raises(ConfigurationError, match="doc_stride"):
        made("SquadV1", **{**files, "doc_stride": 0})
    with pytest.raises(DataError, match="max_seq_length"):
        _ = made("SquadV1", **{**files, "max_seq_length": 6}).task.windows
