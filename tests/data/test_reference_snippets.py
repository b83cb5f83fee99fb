"""Every snippet of the reference runs as it is written."""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from neural_mp import MixedPrecision
from neural_mp.api.user_metrics import parse_metrics
from neural_mp.config import settings_from
from neural_mp.data import DATASETS, TRANSFORMS, build_dataloader
from neural_mp.metrics import METRICS, build_metric

REFERENCE = Path(__file__).parents[2] / "docs" / "data_and_metrics.md"
TEXT = REFERENCE.read_text(encoding="utf-8")


def snippets(language):
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


(OWN_CODE,) = (text for text in snippets("python") if text.startswith("# my_code.py"))


@pytest.fixture
def data_folder(tmp_path, monkeypatch):
    """The files that the reference speaks of, in the current directory."""
    image = pytest.importorskip("PIL.Image")
    digits = load_digits()
    np.savez(tmp_path / "digits.npz", inputs=digits.images, labels=digits.target)
    np.save(tmp_path / "images.npy", digits.images)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        image.new("RGB", (30, 20), "red").save(tmp_path / "images" / name / "1.png")
    for folder, mode in (("photos", "RGB"), ("masks", "L")):
        (tmp_path / folder).mkdir()
        image.new(mode, (30, 20), "white").save(tmp_path / folder / "1.png")
    (tmp_path / "flowers.csv").write_text("width,height,kind\n1,2,rose\n3,4,tulip\n")
    (tmp_path / "my_code.py").write_text(OWN_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_code", None)


@pytest.mark.parametrize("snippet", snippets("yaml"))
def test_yaml_runs(data_folder, snippet):
    ((key, spec),) = yaml.safe_load(snippet).items()
    if key == "evaluation":
        names = spec["accuracy"].get("multi_metrics") or spec["accuracy"]["metric"]
        metrics = settings_from({key: spec}).evaluation.metrics
        assert len(metrics) == sum(name != "weight" for name in names)
        return
    if key == "metric":
        ((name, options),) = spec.items()
        assert callable(build_metric(name, options).update)
        return
    batches = list(build_dataloader(spec))
    inputs, labels = batches[0]
    assert len(inputs) == len(labels) == min(spec.get("batch_size", 1), len(inputs))


def test_the_picture_pipeline_gives_what_a_network_takes(data_folder):
    ((inputs, labels),) = build_dataloader(yaml.safe_load(snippets("yaml")[0])["dataloader"])
    assert inputs.shape == (2, 3, 224, 224)
    assert inputs.dtype == np.float32
    assert labels.tolist() == [0, 1]


@pytest.mark.parametrize("snippet", [text for text in snippets("python") if text != OWN_CODE])
def test_python_runs(data_folder, snippet):
    names = {"converter": MixedPrecision(), "my_function": lambda predictions, labels: 0.5}
    exec(snippet, names)
    if names["converter"].metric is not None:
        assert len(parse_metrics(names["converter"].metric)) > 0


@pytest.mark.parametrize("name", [*DATASETS, *TRANSFORMS, *METRICS])
def test_every_name_is_in_the_reference(name):
    assert f"`{name}`" in TEXT
