"""Words that are choices are strings, and only the known ones."""

import json
import pickle

import pytest

from neural_mp.core.enums import Algorithm, Approach, Objective
from neural_mp.core.precision import Precision, QuantSpec
from neural_mp.errors import ConfigurationError, PlanError
from neural_mp.util.string_enum import Word


def test_a_word_is_its_text_in_every_place():
    assert Algorithm.KL == "kl"
    assert {"kl": 1}[Algorithm.KL] == {Algorithm.KL: 1}["kl"] == 1
    assert f"{Algorithm.KL}" == str(Algorithm.KL) == "kl"
    assert json.dumps({Objective.FOOTPRINT: Approach.STATIC}) == '{"footprint": "static"}'
    assert pickle.loads(pickle.dumps(Precision.BF16)) is Precision.BF16


def test_a_word_is_read_from_its_text_and_an_unknown_one_is_refused_with_the_nearest():
    assert Approach.read("dynamic", "approach") is Approach.DYNAMIC
    assert Approach.read(Approach.STATIC, "approach") is Approach.STATIC
    with pytest.raises(ConfigurationError, match=r"approach cannot be 'dynamc'.*'dynamic'"):
        Approach.read("dynamc", "approach")
    with pytest.raises(ConfigurationError, match="approach cannot be 3"):
        Approach.read(3, "approach")


def test_what_a_tensor_is_quantized_with_holds_words():
    spec = QuantSpec("uint8", "asymmetric", "per_tensor", "percentile")
    assert spec.algorithm is Algorithm.PERCENTILE
    assert all(isinstance(value, Word) for value in vars(spec).values())
    assert spec == QuantSpec.parse(str(spec))
    with pytest.raises(PlanError, match="scheme of a quantized tensor cannot be 'lopsided'"):
        QuantSpec("uint8", "lopsided", "per_tensor")
