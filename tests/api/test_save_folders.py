"""Folders of saved results: only files of an earlier result are replaced."""

import hashlib
import json
from pathlib import Path

import pytest

import neural_mp
from neural_mp import MixedPrecision

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_runs")]


@pytest.fixture(scope="module")
def untouched(net, tmp_path_factory):
    """A result that is the FP32 model."""
    converter = MixedPrecision(workspace=tmp_path_factory.mktemp("workspace"))
    converter.precisions = "fp32"
    converter.model = net
    return converter()


def test_saving_over_a_model_of_somebody_else_is_refused(untouched, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "model.pt2").write_text("keep me")
    with pytest.raises(neural_mp.NeuralMPError, match=r"precious.*contains 'model.pt2'"):
        untouched.save(tmp_path / "precious")
    assert [file.name for file in (tmp_path / "precious").iterdir()] == ["model.pt2"]
    assert (tmp_path / "precious" / "model.pt2").read_text() == "keep me"
    (tmp_path / "file").write_text("keep me")
    with pytest.raises(neural_mp.NeuralMPError, match=r"file' is a file; choose a folder"):
        untouched.save(tmp_path / "file")


def test_a_folder_may_be_there_empty_or_with_other_files(untouched, tmp_path, monkeypatch):
    empty, shared = tmp_path / "empty", tmp_path / "shared"
    empty.mkdir()
    (shared / "logs").mkdir(parents=True)
    (shared / "notes.txt").write_text("keep me")
    (shared / "logs" / "run.log").write_text("keep me, too")
    for folder in (empty, shared, shared):  # its own earlier result is replaced
        untouched.save(folder)
        assert neural_mp.load(folder).plan == untouched.plan
    assert (shared / "notes.txt").read_text() == "keep me"
    assert (shared / "logs" / "run.log").read_text() == "keep me, too"
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    untouched.save(".")
    assert neural_mp.load(tmp_path / "here").plan == untouched.plan


def test_of_an_earlier_result_nothing_is_left_and_nothing_else_is_touched(untouched, tmp_path):
    untouched.save(tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "neural_mp.json").read_text())
    digest = hashlib.sha256(b"old").hexdigest()
    manifest["files"] |= {"old.bin": digest, "../outside": digest, "link/outside": digest}
    (tmp_path / "out" / "neural_mp.json").write_text(json.dumps(manifest))
    for name in ("old.bin", "mine.txt", "../outside"):
        (tmp_path / "out" / name).write_text("old")
    (tmp_path / "out" / "link").symlink_to(tmp_path)
    with pytest.raises(neural_mp.NeuralMPError, match=r"contains 'link/outside', which no earlier"):
        untouched.save(tmp_path / "out")
    (tmp_path / "out" / "link").unlink()
    untouched.save(tmp_path / "out")
    assert not (tmp_path / "out" / "old.bin").exists()
    assert (tmp_path / "out" / "mine.txt").exists()
    assert (tmp_path / "outside").exists()
    assert neural_mp.load(tmp_path / "out").plan == untouched.plan


def test_a_file_that_was_changed_is_not_overwritten(untouched, tmp_path):
    untouched.save(tmp_path / "out")
    (tmp_path / "out" / "plan.yaml").write_text("edited for hours")
    with pytest.raises(neural_mp.NeuralMPError, match=r"'plan.yaml', .* was changed since"):
        untouched.save(tmp_path / "out")
    assert (tmp_path / "out" / "plan.yaml").read_text() == "edited for hours"


def test_a_result_whose_save_was_killed_is_complete_at_the_next_load(
    untouched, tmp_path, monkeypatch
):
    untouched.save(tmp_path / "out")

    class Killed(BaseException):
        pass

    move = Path.replace

    def replace_but_manifest(file, destination):
        if Path(destination).name == "neural_mp.json":
            raise Killed
        return move(file, destination)

    with monkeypatch.context() as patches:
        patches.setattr(Path, "replace", replace_but_manifest)
        with pytest.raises(Killed):
            untouched.save(tmp_path / "out")
    assert neural_mp.load(tmp_path / "out").plan == untouched.plan
    untouched.save(tmp_path / "out")
    assert not list((tmp_path / "out").glob(".neural_mp*"))


def test_a_model_without_its_list_of_files_is_not_overwritten(untouched, tmp_path):
    untouched.save(tmp_path / "out")
    (tmp_path / "out" / "neural_mp.json").unlink()
    with pytest.raises(neural_mp.NeuralMPError, match=r"contains 'plan.yaml'.*not overwritten"):
        untouched.save(tmp_path / "out")


def test_the_names_of_all_frameworks_files_are_reserved():
    from neural_mp.adaptors.onnxrt.files import storage as onnxrt
    from neural_mp.adaptors.pytorch.files import storage as pytorch
    from neural_mp.adaptors.tensorflow.files import graph_files as tensorflow
    from neural_mp.api.saved_model import RESERVED

    assert {onnxrt.MODEL_FILE, f"{onnxrt.MODEL_FILE}.data", onnxrt.DETAILS_FILE} < {*RESERVED}
    assert {pytorch.PROGRAM_FILE, pytorch.DETAILS_FILE} < {*RESERVED}
    assert {tensorflow.MODEL_FILE, tensorflow.DETAILS_FILE, "variables"} < {*RESERVED}
