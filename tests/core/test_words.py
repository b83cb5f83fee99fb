"""Words that are choices are strings, and only the known ones."""

import json
import pickle

import pytest

from neural_mp.core.enums import Approach, CalibrationAlgorithm, Objective
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import ConfigurationError, PlanError
from neural_mp.util.string_enum import StringEnum


def test_a_word_is_its_text_in_every_place():
    assert CalibrationAlgorithm.KL == "kl"
    assert {"kl": 1}[CalibrationAlgorithm.KL] == {CalibrationAlgorithm.KL: 1}["kl"] == 1
    assert f"{CalibrationAlgorithm.KL}" == str(CalibrationAlgorithm.KL) == "kl"
    assert json.dumps({Objective.FOOTPRINT: Approach.STATIC}) == '{"footprint": "static"}'
    assert pickle.loads(pickle.dumps(Precision.BF16)) is Precision.BF16


def test_a_word_is_read_from_its_text_and_an_unknown_one_is_refused_with_the_nearest():
    assert Approach.parse("dynamic", "approach") is Approach.DYNAMIC
    assert Approach.parse(Approach.STATIC, "approach") is Approach.STATIC
    with pytest.raises(ConfigurationError, match=r"approach cannot be 'dynamc'.*'dynamic'"):
        Approach.parse("dynamc", "approach")
    with pytest.raises(ConfigurationError, match="approach cannot be 3"):
        Approach.parse(3, "approach")


def test_what_a_tensor_is_quantized_with_holds_words():
    spec = QuantSpec("uint8", "asymmetric", "per_tensor", "percentile")
    assert spec.algorithm is CalibrationAlgorithm.PERCENTILE
    fields = {**vars(spec)}
    assert fields.pop("group_size") is None
    assert fields.pop("corrections") == ()
    assert all(isinstance(value, StringEnum) for value in fields.values())
    assert spec == QuantSpec.parse(str(spec))
    with pytest.raises(PlanError, match="scheme of a quantized tensor cannot be 'lopsided'"):
        QuantSpec("uint8", "lopsided", "per_tensor")
