"""What is saved comes back as it was, in another process without the user's code; or not at all."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import sympy
import torch
from integers import MACHINE
from torch import nn

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.pytorch.files.storage import PROGRAM_FILE
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, ModelLoadError
from neural_mp.testing import uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8

#: Runs in a process that has never heard of the user's classes.
NEW_PROCESS = """
import sys
import numpy as np
import neural_mp

path, data = sys.argv[1:]
model = neural_mp.load(path)
inputs = np.load(data)
outputs = {str(size): model(inputs[:size]) for size in (1, 5, len(inputs))}
assert "nets" not in sys.modules
kernels = sum("onednn.q" in str(n.target) for n in model.held.runnable_graph.graph.nodes)
np.savez(data + ".out.npz", kernels=kernels, **outputs)
"""


@pytest.fixture(scope="module")
def saved(tuned, tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "saved"
    tuned.save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of the saved model, which tests may damage."""
    return Path(shutil.copytree(saved, tmp_path / "saved"))


def test_a_new_process_runs_it_with_the_same_results_and_kernels(tuned, folder, digits, tmp_path):
    images = digits[1].images[:40]
    data = str(tmp_path / "images.npy")
    np.save(data, images)
    subprocess.run([sys.executable, "-c", NEW_PROCESS, str(folder), data], check=True, cwd=tmp_path)
    results = np.load(data + ".out.npz")
    assert results["kernels"] == len(tuned.plan) == 7
    for size in (1, 5, 40):
        np.testing.assert_array_equal(results[str(size)], tuned(images[:size]))


def test_the_file_of_an_int8_model_is_a_third_of_the_float_one(tmp_path):
    """The scales, names and graph of a small net weigh something; 400 KB of weights outweigh it."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(160, 160) for _ in range(6)]
    module, x = torch.nn.Sequential(*layers).eval(), torch.randn(4, 160)
    adaptor = PyTorchAdaptor()
    model = adaptor.load(module, example=x)
    space = adaptor.space(model, MACHINE)
    observed = adaptor.observe(model, [x], space)
    sizes = []
    for index, plan in enumerate((space.fp32_plan(), uniform(space, INT8))):
        target = tmp_path / str(index)
        target.mkdir()
        adaptor.save(adaptor.convert(model, space.resolve(plan), observed, space), target)
        sizes.append((target / PROGRAM_FILE).stat().st_size)
    assert sizes[1] < 0.29 * sizes[0]


def test_torch_reads_the_program_whose_texts_are_compressed(tmp_path):
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU()).eval()
    x = torch.randn(4, 16)
    adaptor = PyTorchAdaptor()
    adaptor.save(adaptor.load(module, example=x), tmp_path)
    file = tmp_path / PROGRAM_FILE
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    for member in members:
        smaller = member.compress_size < member.file_size / 2
        assert smaller == member.filename.endswith(("model.json", "weights_config.json", ".pt"))
    assert torch.equal(torch.export.load(file).module()(x), module(x))
    assert [entry.name for entry in tmp_path.iterdir() if entry.is_dir()] == []


def test_a_file_that_was_cut_off_is_refused(folder):
    file = folder / PROGRAM_FILE
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(ModelLoadError, match=r"model\.pt2.*changed or damaged"):
        neural_mp.load(folder)
    with pytest.raises(ModelLoadError, match="damaged"):
        PyTorchAdaptor().restore(folder)


def test_one_changed_weight_is_noticed(folder):
    file = folder / PROGRAM_FILE
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    with pytest.raises(ModelLoadError, match="changed or damaged"):
        neural_mp.load(folder)


class Malicious:
    def __reduce__(self):
        return exec, ("import pathlib; pathlib.Path('ran').touch()",)


def test_code_in_a_file_never_runs(folder, tmp_path, monkeypatch):
    """The manifest is made to fit, as one who tampers would."""
    monkeypatch.chdir(tmp_path)
    file, changed = folder / PROGRAM_FILE, tmp_path / "changed.pt2"
    payload = tmp_path / "payload"
    torch.save({"x": Malicious()}, payload)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            weights = name.endswith(".pt") or "weight_0" in name
            new.writestr(name, payload.read_bytes() if weights else old.read(name))
    changed.replace(file)
    with pytest.raises(ModelLoadError):
        PyTorchAdaptor().restore(folder)
    assert not Path("ran").exists()


def test_the_names_of_ops_survive(tuned, folder):
    restored = neural_mp.load(folder)
    op_names = [op.name for op in tuned.adaptor.graph(tuned.held) if op.name in tuned.plan]
    assert op_names == [
        op.name for op in restored.adaptor.graph(restored.held) if op.name in tuned.plan
    ]
    assert restored.plan == tuned.plan


def test_what_runs_the_users_code_is_not_saved(tmp_path):
    from architectures import ARCHITECTURES, build

    adaptor, inputs = PyTorchAdaptor(), ARCHITECTURES["early_exit"].inputs(4)
    model = adaptor.load(build("early_exit"), example=inputs, capture="modules")
    with pytest.raises(ConversionError, match="save_plan"):
        adaptor.save(model, tmp_path)


def test_a_plan_replays_module_by_module(tmp_path):
    from architectures import ARCHITECTURES, build

    from neural_mp.api.replay import convert_with_plan

    module, inputs = build("early_exit"), ARCHITECTURES["early_exit"].inputs(4)
    converter = MixedPrecision()
    converter.model = module
    converter.capture = "modules"
    converter.precisions = "int8"
    converter.hardware = MACHINE
    converter.calib_dataloader = [(inputs, None)] * 2
    tuned = converter.fit()
    assert tuned.plan.counts() == {"int8": 4}
    tuned.save_plan(tmp_path / "plan.yaml")
    again = convert_with_plan(
        module, tmp_path / "plan.yaml", inputs=inputs, hardware=MACHINE, capture="modules"
    )
    assert torch.equal(tuned(inputs), again(inputs))


def test_the_manifest_speaks_of_every_file(folder):
    manifest = json.loads((folder / "neural_mp.json").read_text())
    assert {PROGRAM_FILE, "details.json", "plan.yaml"} <= set(manifest["files"])


def test_the_size_of_a_folder_does_not_depend_on_the_batch_of_calibration(tmp_path):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    sizes = []
    for rows in (2, 4096):
        converter = MixedPrecision(
            model=net.eval(), precisions="int8", calib_dataloader=[torch.randn(rows, 64)]
        )
        converter.exit_policy = {"performance_only": True}
        folder = tmp_path / str(rows)
        converter().save(folder)
        sizes.append(sum(file.stat().st_size for file in folder.rglob("*.pt2")))
        assert neural_mp.load(folder)(torch.randn(3, 64)).shape == (3, 4)
    assert max(sizes) - min(sizes) < 4096


class PaddedStack(nn.Module):
    """Strided convolutions with "same" padding: each size holds those of all layers before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3, 3, 3, stride=2) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            rows, columns = (max((-(-size // 2) - 1) * 2 + 3 - size, 0) for size in x.shape[2:])
            x = layer(nn.functional.pad(x, (0, columns, 0, rows))).relu()
        return x


def test_each_size_of_a_saved_program_is_parsed_once(tmp_path, monkeypatch):
    adaptor, net, images = PyTorchAdaptor(), PaddedStack().eval(), torch.randn(2, 3, 40, 40)
    adaptor.save(adaptor.load(net, example=images), tmp_path)
    parse, texts = sympy.sympify, list[str]()

    def parse_and_count(value: object, **options: object) -> object:
        if isinstance(value, str):
            texts.append(value)
        return parse(value, **options)

    monkeypatch.setattr(sympy, "sympify", parse_and_count)
    restored = adaptor.restore(tmp_path)
    assert len(texts) > 5
    assert len(texts) == len(set(texts))
    larger = torch.randn(2, 3, 57, 43)
    torch.testing.assert_close(adaptor.predict(restored, larger), net(larger).detach())
