import subprocess
import sys

import pytest

FRAMEWORKS = ("torch", "tensorflow", "keras", "onnx", "onnxruntime", "sklearn", "optuna", "scipy")


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-c", code], check=True, capture_output=True, text=True
    ).stderr


def imported(report: str) -> set[str]:
    return {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in report.splitlines()}


def test_importing_the_package_imports_no_framework():
    assert not imported(run("import neural_mp")) & set(FRAMEWORKS)


def test_importing_the_package_takes_a_fraction_of_what_is_allowed():
    # Microseconds in the last column but one; the best of three, since machines are busy.
    best = min(
        int(
            next(
                line
                for line in run("import neural_mp").splitlines()
                if line.endswith("| neural_mp")
            ).split("|")[1]
        )
        for _ in range(3)
    )
    assert best < 300_000


def test_the_whole_face_imports_no_framework():
    names = "MixedPrecision, PrecisionPlan, NeuralMPError, load, common"
    assert not imported(run(f"from neural_mp import {names}")) & set(FRAMEWORKS)


def test_every_public_name_is_there():
    import neural_mp

    assert all(getattr(neural_mp, name) is not None for name in neural_mp.__all__)


def test_a_model_is_recognised_without_importing_its_framework():
    report = run(
        "from neural_mp.adaptors.detect import FRAMEWORKS\n"
        "from neural_mp.adaptors.registry import list_framework_names\n"
        "names = [n for n, f in FRAMEWORKS.items() if f.rule.matches_source('net.onnx')]\n"
        "assert names == ['onnxrt']\n"
        "assert set(list_framework_names()) >= set(FRAMEWORKS)"
    )
    assert not imported(report) & set(FRAMEWORKS)


@pytest.mark.slow
def test_what_trains_imports_its_own_framework_when_it_is_asked_for():
    assert not imported(run("from neural_mp.training import LossScale")) & set(FRAMEWORKS)
    assert "tensorflow" not in imported(run("from neural_mp.training import GradScaler"))


def test_what_trains_names_the_framework_that_is_missing():
    code = (
        "import sys\n"
        "sys.modules['torch'] = None  # as if it were not installed\n"
        "from neural_mp.errors import MissingFrameworkError\n"
        "try:\n"
        "    from neural_mp.training import GradScaler\n"
        "except MissingFrameworkError as error:\n"
        "    assert 'GradScaler' in str(error) and '[torch]' in str(error), error\n"
        "else:\n"
        "    raise SystemExit('nothing was said')\n"
    )
    run(code)
