"""Nouns in messages."""

import pytest

from neural_mp.util.text import format_count, with_article


@pytest.mark.parametrize(
    ("count", "noun", "plural", "said"),
    [
        (0, "evaluation", "", "0 evaluations"),
        (1, "evaluation", "", "1 evaluation"),
        (2, "axis", "axes", "2 axes"),
        (1, "axis", "axes", "1 axis"),
    ],
)
def test_one_is_not_many(count, noun, plural, said):
    assert format_count(count, noun, plural) == said


@pytest.mark.parametrize(
    "said",
    [
        "an array",
        "an int",
        "a tuple",
        "an ndarray",
        "an Accuracy",
        "an hour",
        "a union",
        "a user",
        "an MSE",
        "an RMSE",
        "a BERT",
        "an LSTM",
        "a NumPy",
        "a module",
        "a Mean",
        "a uint8",
        "an 'image'",
        "a one",
    ],
)
def test_the_article_is_that_of_the_sound(said):
    _, noun = said.split(" ", 1)
    assert with_article(noun) == said
