import pytest

from neural_mp.errors import ModelLoadError
from neural_mp.io.files import resolve_sibling


def test_files_beside_and_below_a_model_are_its_own(tmp_path):
    model = tmp_path / "net.onnx"
    model.touch()
    (tmp_path / "parts").mkdir()
    assert resolve_sibling(model, "net.data") == tmp_path / "net.data"
    assert resolve_sibling(model, "parts/0.data") == tmp_path / "parts" / "0.data"
    assert resolve_sibling(model, "words.txt", "assets") == tmp_path / "assets" / "words.txt"


def test_in_a_cache_of_links_they_lie_beside_what_the_model_leads_to(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    for name, blob in (("net.onnx", "a1"), ("net.data", "b2")):
        (blobs / blob).touch()
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    assert resolve_sibling(snapshot / "net.onnx", "net.data") == snapshot / "net.data"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/hostname", "out", "ring", "", "a\0b", "sub/../../x"]
)
def test_all_others_are_refused(tmp_path, name):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "net.onnx").touch()
    (tmp_path / "x").touch()
    (folder / "out").symlink_to("../x")
    (folder / "ring").symlink_to("ring")
    with pytest.raises(ModelLoadError, match="outside of the model's folder"):
        resolve_sibling(folder / "net.onnx", name)


def test_a_name_that_no_file_can_have_is_one_error(tmp_path):
    with pytest.raises(ModelLoadError, match="cannot be accessed: File name too long") as raised:
        resolve_sibling(tmp_path / "net.onnx", "x" * 100_000)
    assert len(str(raised.value)) < 1000
