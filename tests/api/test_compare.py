"""`neural-mp compare`, as a user types it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx_nets import as_onnx

import neural_mp
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.optimized_model import OptimizedModel
from neural_mp.core.precision import Precision
from neural_mp.runs.report import Report
from neural_mp.testing import machine, signal_to_noise, uniform

ROOT = Path(__file__).parents[2]


def save_int8(source, images: np.ndarray, folder: Path) -> OptimizedModel:
    """The model, all in INT8, in a folder as `OptimizedModel.save` writes it."""
    adaptor = adaptor_for(source)
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine())
    plan = uniform(space, Precision.INT8)
    observations = adaptor.observe(model, [images], space)
    converted = adaptor.convert(model, space.resolve(plan), observations, space)
    result = OptimizedModel(LoadedModel(adaptor, converted), plan, Report())
    result.save(folder)
    return result


@pytest.fixture(scope="module")
def made(tmp_path_factory, exported, digits):
    """A folder with a model, the model in INT8, and data."""
    folder = tmp_path_factory.mktemp("compared")
    train, test = digits
    (folder / "net.pt2").write_bytes(exported)
    np.save(folder / "images.npy", test.images[:120])
    np.savez(folder / "test.npz", inputs=test.images, labels=test.labels)
    np.savez(folder / "named.npz", x=test.images[:50])
    loader = "{batch_size: 100, dataset: {numpy: {path: test.npz}}}"
    (folder / "conf.yaml").write_text(f"evaluation: {{accuracy: {{dataloader: {loader}}}}}\n")
    save_int8(str(folder / "net.pt2"), train.images[:100], folder / "tuned")
    return folder


@pytest.fixture
def compared(made, tmp_path):
    """The folder that a test is in, with the same in it."""
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.slow
def test_the_table_shows_every_op_and_where_the_models_part(run, compared):
    code, out, err = run("compare", "net.pt2", "tuned", "--data", "images.npy")
    assert code == 0
    assert err == ""
    assert "Outputs: 100 samples in 50 batches" in out
    assert "block1.conv1, block1.act" in out
    assert "dB, inputs equal; largest SQNR drop" in out
    assert "ops not compared: they are fused into another op in B" in out


@pytest.mark.slow
def test_a_program_reads_the_same_as_json(run, compared, net, digits):
    arguments = ("compare", "net.pt2", "tuned", "--data", "images.npy", "--json", "--worst", "2")
    code, out, _ = run(*arguments, "--samples", "120", "--batch-size", "40")
    document = json.loads(out)
    assert code == 0
    assert (document["samples"], document["batches"]) == (120, 3)
    assert len(document["worst"]) == 2
    assert set(document["worst"]) <= {row["name"] for row in document["layers"]}
    images = digits[1].images[:120]
    with torch.no_grad():
        exact = net(torch.from_numpy(images)).numpy()
    expected = signal_to_noise(exact, neural_mp.load("tuned")(images))
    assert document["outputs"][0]["sqnr"] == pytest.approx(expected, abs=0.01)


@pytest.mark.slow
def test_csv_has_a_line_for_every_op(run, compared):
    arguments = ("compare", "net.pt2", "tuned", "--data", "images.npy", "--samples", "10")
    whole = list(csv.DictReader(io.StringIO(run(*arguments, "--csv")[1])))
    assert [row["name"] for row in whole][:2] == ["relu", "pool"]
    assert float(whole[0]["sqnr"]) > 30
    worst = list(csv.DictReader(io.StringIO(run(*arguments, "--csv", "--worst", "3")[1])))
    assert len(worst) == 3
    assert all(row in whole for row in worst)


@pytest.mark.slow
@pytest.mark.parametrize("data", ["test.npz", "conf.yaml", "named.npz"])
def test_data_are_arrays_or_those_of_a_tuning_file(run, compared, data):
    arguments = ("--data", data, "--samples", "50", "--batch-size", "25", "--json")
    code, out, _ = run("compare", "net.pt2", "tuned", *arguments)
    assert code == 0
    # A tuning file has a size of batches of its own; the batch that reaches 50 is run whole.
    assert json.loads(out)["samples"] == (100 if data == "conf.yaml" else 50)
    assert json.loads(out)["outputs"][0]["sqnr"] > 25


@pytest.mark.slow
def test_without_data_a_warning_says_that_random_inputs_say_little(run, compared):
    code, out, err = run("compare", "net.pt2", "tuned")
    assert code == 0
    assert "random inputs; results may differ" in err
    assert "1 batch" in out


@pytest.mark.slow
def test_bad_input_gets_one_line(run, compared, deep, digits):
    example = (torch.zeros(2, 1, 8, 8),)
    torch.export.save(torch.export.export(deep, example), compared / "other.pt2")
    np.savez(compared / "uneven.npz", x=digits[1].images[:4], y=digits[1].images[:3])
    (compared / "words.npy").write_text("words")
    (compared / "conf.yaml").write_text("model: {name: net.pt2}\n")
    for arguments, message in [
        (("other.pt2", "tuned", "--data", "images.npy"), "ops in common"),
        (("net.pt2", "tuned", "--data", "missing.npy"), "there is no file 'missing.npy'"),
        (("net.pt2", "tuned", "--data", "missing.yaml"), "no tuning file 'missing.yaml'"),
        (("net.pt2", "tuned", "--data", "images.txt"), "must be a file with one of the suffixes"),
        (("net.pt2", "tuned", "--data", "words.npy"), "cannot be read as plain .npy"),
        (("net.pt2", "tuned", "--data", "uneven.npz"), "equally many samples, got x 4, y 3"),
        (("net.pt2", "tuned", "--data", "conf.yaml"), "must have calibration or evaluation data"),
        (("net.pt2", "tuned", "--json", "--csv"), "exclude each other"),
        (("net.pt2", "nowhere", "--data", "images.npy"), "nowhere"),
    ]:
        code, out, err = run("compare", *arguments)
        assert code == 2, arguments
        if "--json" in arguments:
            assert message in json.loads(out)["error"]["message"]
        else:
            assert out == ""
        assert message in err
        assert len(err.strip().splitlines()) == 1, err


def in_a_fresh_process(*arguments: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "neural_mp.cli.app", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ["PYTHONPATH"]])},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["onnxrt", "tensorflow"])
def test_a_saved_result_is_compared_with_its_model(framework, compared, run, net, digits):
    """That of ONNX Runtime in a fresh process."""
    if framework == "onnxrt":
        images, file, run = digits[1].images[:64], compared / "net.onnx", in_a_fresh_process
        onnx.save(as_onnx(net), file)
    else:
        from keras_nets import channels_last, small_net

        images, file = channels_last()[1].images[:64], compared / "net.keras"
        small_net()  # Keras numbers layers as they are made: those of a file keep their names
        small_net().save(file)
    save_int8(str(file), images, compared / "own")
    np.save(compared / "images.npy", images)
    command = ("compare", str(file), "own", "--data", "images.npy", "--json", "-q")
    code, out, err = run(*command, "--batch-size", "32")
    assert code == 0, err
    document = json.loads(out)
    assert document["outputs"][0]["sqnr"] > 25
    stored = [row["dtypes"][1] for row in document["layers"]]
    assert sum("uint8" in kind for kind in stored) >= 5
    assert all(row["sqnr"] > 25 for row in document["layers"])
    assert set(document["left_out"]) == {"are fused into another op in B"}
