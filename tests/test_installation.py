"""Commands that install extras: the right command in messages, pages and the Dockerfile."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

from neural_mp.errors import HistoryError
from neural_mp.runs.registry import open_storage
from neural_mp.util import optional_packages
from neural_mp.util.optional_packages import install_command

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
_EXTRAS = PROJECT.partition("[project.optional-dependencies]\n")[2]
#: Folder of an adaptor → what its modules may import, as its extra installs it.
ADAPTOR_PACKAGES = {
    "litert": {"ai_edge_litert", "ai_edge_quantizer"},
    "onnxrt": {"google", "onnx", "onnx_ir", "onnxruntime"},
    "openvino": {"ml_dtypes"},
    "pytorch": {"torch"},
    "tensorflow": {"google", "keras", "tensorflow"},
}
#: What else is imported by modules for users of other extras alone.
OTHER_PACKAGES = {
    "testing": {"onnx", "onnxruntime", "pytest", "tensorflow"},
    "ui": {"starlette", "uvicorn"},
}
EXTRAS = re.findall(r"^(\w+) = ", _EXTRAS.partition("\n[")[0], flags=re.MULTILINE)
README = (ROOT / "README.md").read_text()
#: What the README leaves to the reader: a trained model, a metric, data and a batch.
BEFORE_SNIPPET = """
import numpy as np
import torch

import neural_mp
from neural_mp.strategies import refinement

assert "bare" in neural_mp.__file__, neural_mp.__file__
refinement._NEIGHBOURS, refinement._MAX_ROUNDS = 2, 1  # nothing is asked about speed
draw = np.random.default_rng(0)
classes = draw.integers(0, 10, 1000)
pixels = (draw.random((10, 64))[classes] + draw.normal(0, 0.1, (1000, 64))).astype("float32")
torch.manual_seed(0)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)

    def forward(self, x):
        return self.head(torch.relu(self.body(x)))


model = Net()
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(60):
    optimizer.zero_grad()
    outputs = model(torch.from_numpy(pixels))
    torch.nn.functional.cross_entropy(outputs, torch.from_numpy(classes)).backward()
    optimizer.step()


class Metric:
    def __init__(self):
        self.reset()

    def reset(self):
        self.hits = []

    def update(self, preds, labels):
        self.hits.extend(np.asarray(preds).argmax(1) == np.asarray(labels))

    def result(self):
        return float(np.mean(self.hits))


dataset = list(zip(pixels[:200], classes[:200]))
images = torch.from_numpy(pixels[:8])
"""
AFTER_SNIPPET = """
assert optimized(images).shape == (8, 10)
assert optimized.plan["head"].precision in ("int8", "bf16", "fp32")
"""
TEXTS = [
    *(ROOT / "docs").rglob("*.md"),
    *ROOT.glob("*.md"),
    *(ROOT / "conf").iterdir(),
    *(ROOT / "examples").glob("*/*.md"),
    *(ROOT / "neural_mp").rglob("*.py"),
]


def test_the_command_of_a_checkout_names_the_checkout_and_an_extra_that_exists():
    arguments = shlex.split(install_command("ray"))
    assert arguments[:2] == ["pip", "install"]
    assert Path(arguments[arguments.index("-c") + 1]).samefile(ROOT / "constraints.txt")
    folder, extra = re.fullmatch(r"(.+)\[(\w+)\]", arguments[-1]).groups()
    assert Path(folder).samefile(ROOT)
    assert extra in EXTRAS


def test_the_command_of_a_wheel_lists_the_packages_of_the_extra(monkeypatch, tmp_path):
    monkeypatch.setattr(optional_packages, "_CHECKOUT", tmp_path)
    lines = [
        "numpy>=1.26",
        'ray>=2.60; extra == "ray"',
        'keras>=3.9; extra == "tensorflow"',
        'tensorflow>=2.17; (python_version >= "3.10") and extra == "tensorflow"',
    ]
    monkeypatch.setattr(metadata, "requires", lambda name: lines)
    assert install_command("ray") == "pip install 'ray>=2.60'"
    assert install_command("tensorflow") == "pip install 'keras>=3.9' 'tensorflow>=2.17'"


def test_no_text_installs_a_release_that_no_index_has():
    for file in TEXTS:
        assert not re.search(r"pip install\s+['\"]?neural-mp", file.read_text()), file


def test_every_extra_that_a_text_installs_exists():
    for file in TEXTS:
        for extras in re.findall(r"'\.\[([\w,]+)\]'", file.read_text()):
            assert set(extras.split(",")) <= set(EXTRAS), (file, extras)


def test_the_container_installs_as_the_readme_does_from_files_that_it_receives():
    """There may be no engine to build the image: its instructions are compared with the files."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (install,) = (line for line in lines if "pip install" in line)
    readme = re.search(r"pip install (-c \S+) -e '\.\[(\w+)\]'", README)
    assert f'{readme[1]} ".[${{EXTRAS}}]"' in install
    (default,) = (line.removeprefix("ARG EXTRAS=") for line in lines if line.startswith("ARG"))
    assert {default, readme[2]} <= set(EXTRAS)
    sent = (ROOT / ".dockerignore").read_text()
    for name in copied_files():
        assert (ROOT / name).exists()
        assert f"!{name}\n" in sent
    python = re.search(r"FROM python:(\d\.\d+)-slim", "\n".join(lines))[1]
    assert f"Programming Language :: Python :: {python}" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.slow
def test_a_wheel_in_a_bare_environment_runs_the_first_snippet_of_the_readme(tmp_path):
    """The wheel is built from the files that the container receives."""
    source, built, bare = (tmp_path / name for name in ("source", "built", "bare"))
    source.mkdir()
    for name in copied_files():
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    offline = ("--no-deps", "--no-index")
    run("-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", built, source)
    run("-m", "venv", "--without-pip", bare)
    (wheel,) = built.iterdir()
    # What runs below compiles what it needs.
    offline = (*offline, "--no-compile")
    run("-m", "pip", "--python", bare / "bin" / "python", "install", *offline, wheel)
    (site,) = bare.glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib"))
    (snippet,) = re.findall(r"^```python\n(from neural_mp import.*?)^```$", README, re.S | re.M)[:1]
    script = tmp_path / "snippet.py"
    script.write_text(BEFORE_SNIPPET + snippet + AFTER_SNIPPET)
    run(script, python=bare / "bin" / "python", cwd=tmp_path)
    assert (tmp_path / "tuned").is_dir()
    report = (bare / "bin" / "neural-mp", "report", "neural_mp_workspace", "-o", "page.html")
    run(*report[1:], python=report[0], cwd=tmp_path)
    assert "<svg" in (tmp_path / "page.html").read_text()


def copied_files():
    """The files of the checkout that the Dockerfile copies."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    return [name for line in lines if line.startswith("COPY") for name in line.split()[1:-1]]


def run(*arguments, python=sys.executable, cwd=None):
    # Nothing of the checkout but the module that spares processes collections of garbage.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "child_processes")}
    command = [str(argument) for argument in (python, *arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_postgresql_storage_without_its_driver_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "psycopg", None)  # as if it were not installed
    with pytest.raises(HistoryError, match=r"requires the package psycopg.*\[postgresql\]"):
        open_storage("postgresql://user@127.0.0.1:1/none")


def imported_at_once(node: ast.AST) -> set[str]:
    """Return the packages that a statement of a module imports, functions aside."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom):
        return {(node.module or "").partition(".")[0]}
    is_later = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    if is_later or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
        return set()
    return set().union(*map(imported_at_once, ast.iter_child_nodes(node)))


def test_modules_import_only_what_their_extra_installs():
    source = "import a.b\nif 1:\n  from c import d\ndef f(): import e"
    assert imported_at_once(ast.parse(source)) == {"a", "c"}
    required = re.search(r"^dependencies = \[(.*?)\]", PROJECT, re.DOTALL | re.MULTILINE)[1]
    names = {name.lower() for name in re.findall(r'"([\w-]+)', required)}
    modules = {"pyyaml": "yaml", "scikit-learn": "sklearn", "py-cpuinfo": "cpuinfo"}
    always = {modules.get(name, name) for name in names} | {"neural_mp", *sys.stdlib_module_names}
    foreign = {}
    for file in (ROOT / "neural_mp").rglob("*.py"):
        area, part, *_ = (*file.relative_to(ROOT / "neural_mp").parts, "")
        own = (ADAPTOR_PACKAGES if area == "adaptors" else OTHER_PACKAGES).get(
            part if area == "adaptors" else area, set()
        )
        if missing := imported_at_once(ast.parse(file.read_text())) - always - own:
            foreign[str(file)] = missing
    assert not foreign
