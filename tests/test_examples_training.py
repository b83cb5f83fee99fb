"""The examples of training run from their own folders, as their READMEs say."""

import re

import pytest
from examples_here import copied_to, run_command, run_script

import neural_mp

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return copied_to(tmp_path_factory.mktemp("examples"))


@pytest.mark.parametrize("framework", ["keras", "torch"])
def test_training_in_float16_breaks_and_with_the_plan_does_not(copies, framework):
    printed = run_script(copies / f"train_digits_{framework}" / "train.py")
    in_float32, *_, advised = re.findall(r"accuracy ([\d.]+)", printed)
    assert float(advised) > float(in_float32) - 0.02
    assert "'energy' (Energy) turns float16 inputs of at most" in printed
    broken = {"keras": "20 steps in a row had no effect", "torch": "57 of 57 steps skipped"}
    assert broken[framework] in printed
    assert (
        f"fp16: keep energy, {'predictions of 8' if framework == 'keras' else 'logits of 6'}"
        in (printed)
    )


def test_quantization_aware_training_recovers_accuracy(copies):
    printed = run_script(copies / "qat_digits_torch" / "train.py")
    figures = [float(number) for number in re.findall(r" (\d\.\d+)$", printed, re.MULTILINE)]
    fp32, int8, simulated, trained = figures
    assert int8 < fp32 - 0.04
    assert trained > fp32 - 0.02
    assert abs(trained - simulated) <= 0.002


def test_advice_from_the_command_line_is_the_examples_own(copies):
    folder = copies / "train_digits_keras"
    (folder / "out").mkdir(exist_ok=True)
    options = ("--loss", "sparse_categorical_crossentropy", "--precision", "fp16")
    printed = run_command(folder, "advise", "conf.yaml", *options, "--output", "out/again.yaml")
    assert "keep energy, predictions of 8 in float32" in printed
    counts = neural_mp.PrecisionPlan.load(folder / "out" / "again.yaml").counts()
    assert counts == {"fp16": 6, "fp32": 2}


def test_training_with_the_rounding_of_a_plan_recovers_accuracy_in_keras(copies):
    printed = run_script(copies / "qat_digits_keras" / "train.py")
    in_fp32, quantized, simulated, converted, resumed = map(
        float, re.findall(r": ([\d.]+)", printed)
    )
    assert quantized < in_fp32 - 0.01
    assert converted > in_fp32 - 0.01
    assert abs(simulated - converted) <= 0.002
    assert resumed == converted
