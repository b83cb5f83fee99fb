"""Audits of files for accelerators, by Python and by the command line."""

import json

import numpy as np
import onnx
import pytest
from command_here import run_main
from onnx_nets import graph, op

from neural_mp.adaptors.onnxrt.targets.adaptor import TargetAdaptor
from neural_mp.api.targets import audit_file
from neural_mp.cli.errors import ExitCode
from neural_mp.core.hardware import Hardware
from neural_mp.errors import ConfigurationError, DataError, ModelLoadError
from neural_mp.targets import load_profile


@pytest.fixture
def written(tmp_path):
    """A file for AMD's XINT8, with scales that are powers of two."""
    draw = np.random.default_rng(0)
    constants = {
        "w": draw.normal(size=(4, 1, 3, 3)).astype(np.float32),
        "b": draw.normal(size=4).astype(np.float32),
    }
    nodes = [op("Conv", "image w b", "mixed", pads=[1, 1, 1, 1]), op("Relu", "mixed", "y")]
    net = graph(nodes, {"image": ["batch", 1, 8, 8]}, ["y"], constants, opset=21)
    data = [draw.standard_normal((2, 1, 8, 8)).astype(np.float32)]
    adaptor = TargetAdaptor(load_profile("vitisai"))
    held = adaptor.load(net, example=(data[0],))
    space = adaptor.space(held, Hardware())
    observed = adaptor.observe(held, data, space)
    converted = adaptor.convert(held, space.resolve(space.fastest_plan()), observed, space)
    adaptor.single_file.save_file(converted, tmp_path / "net.onnx", {})
    return tmp_path / "net.onnx"


def test_file_of_ours_has_no_finding_and_says_what_was_not_compiled(written):
    audit = audit_file(written, "vitisai")
    assert audit.holds
    assert audit.compiled is None
    assert "only the structure was audited" in audit.not_compiled
    assert any("from documents, untested" in note for note in audit.notes)


def test_command_ends_with_the_code_of_a_broken_plan(written):
    model = onnx.load(written)
    scale = next(t for t in model.graph.initializer if t.name == "image/int8/scale")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.float32(0.3), scale.name))
    onnx.save(model, written)
    code, out, _ = run_main("audit", str(written), "--target", "vitisai", "--json")
    assert code == ExitCode.PLAN_BROKEN
    document = json.loads(out)
    assert document["holds"] is False
    assert document["compiled"] is False
    assert {finding["rule"] for finding in document["findings"]} == {"scale"}
    assert all("power" in finding["message"] for finding in document["findings"])


def test_command_shows_the_verdict_in_words(written):
    code, out, err = run_main("audit", str(written), "--target", "vitisai")
    assert code == 0
    assert "no finding for AMD Vitis AI (XINT8)" in out + err


def test_mistakes_are_one_error_each(written, tmp_path):
    with pytest.raises(ConfigurationError, match="did you mean 'vitisai'"):
        audit_file(written, "vitsai")
    with pytest.raises(ModelLoadError, match="does not exist"):
        audit_file(tmp_path / "missing.onnx", "qdq")
    (tmp_path / "text.onnx").write_text("no model")
    with pytest.raises(ModelLoadError, match="not an ONNX model"):
        audit_file(tmp_path / "text.onnx", "qdq")
    onnx.save(onnx.ModelProto(ir_version=10), tmp_path / "empty.onnx")
    with pytest.raises(ModelLoadError, match="the graph is missing"):
        audit_file(tmp_path / "empty.onnx", "qdq")


def test_weights_beside_a_file_are_read_and_their_loss_is_an_error(written, tmp_path):
    apart = tmp_path / "apart.onnx"
    onnx.save(
        onnx.load(written), apart, save_as_external_data=True, location="w.data", size_threshold=0
    )
    assert audit_file(apart, "vitisai").holds
    (tmp_path / "w.data").unlink()
    with pytest.raises(ModelLoadError, match=r"w\.data"):
        audit_file(apart, "vitisai")


def test_link_to_a_file_is_audited_as_the_file(written, tmp_path):
    (tmp_path / "link.onnx").symlink_to(written)
    assert audit_file(tmp_path / "link.onnx", "vitisai").holds


def test_data_without_an_input_are_refused(written, tmp_path):
    np.savez(tmp_path / "data.npz", other=np.zeros((2, 3)), more=np.zeros((2, 3)))
    with pytest.raises(DataError, match="lack 'image'"):
        audit_file(written, "qnn", tmp_path / "data.npz")


def test_inspection_shows_what_an_accelerator_computes_in_integers(tmp_path):
    constants = {"w": np.ones((4, 1, 3, 3), np.float32)}
    nodes = [op("Conv", "image w", "mixed"), op("Erf", "mixed", "y")]
    net = graph(nodes, {"image": ["batch", 1, 8, 8]}, ["y"], constants, opset=21)
    onnx.save(net, tmp_path / "net.onnx")
    arguments = ("inspect", str(tmp_path / "net.onnx"), "--target", "qnn", "--json")
    code, out, _ = run_main(*arguments)
    assert code == 0
    ops = {document["name"]: document for document in json.loads(out)}
    assert "int16" in str(ops["mixed"])
    assert "has no integer kernel for Erf" in str(ops["y"])
