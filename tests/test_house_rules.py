"""What is true of the source tree as a whole."""

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = "packages import only packages below them"


def run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


def test_the_import_contracts_hold():
    result = run(tool("lint-imports"), "--no-cache")
    assert result.returncode == 0, result.stdout


BREACHES = [
    ("core/graph.py", "import neural_mp.space", LAYERS),
    ("errors.py", "import neural_mp.common", LAYERS),
    ("util/text.py", "import neural_mp.io.files", LAYERS),
    ("io/files.py", "import neural_mp.core.plan", LAYERS),
    ("amp/painting.py", "import neural_mp.space", LAYERS),
    ("space/space.py", "import neural_mp.search.assignment", LAYERS),
    ("targets/profile.py", "import neural_mp.space", LAYERS),
    ("search/assignment.py", "import neural_mp.strategies", LAYERS),
    ("tuning/tuner.py", "def late():\n    import neural_mp.reporting.tables", LAYERS),
    ("runs/report.py", "def late():\n    import neural_mp.reporting.tables", LAYERS),
    ("tuning/evaluation/batches.py", "import neural_mp.api.mixed_precision", LAYERS),
    ("config/build.py", "import neural_mp.cli.app", LAYERS),
    ("reporting/console.py", "import neural_mp.jobs", LAYERS),
    ("metrics/base.py", "import neural_mp.compat.inc", LAYERS),
    ("adaptors/contract.py", "import neural_mp.testing", LAYERS),
    ("strategies/basic.py", "import neural_mp.tuning.tuner", LAYERS),
    ("strategies/basic.py", "import time", "amp, space, search and strategies are pure"),
    ("space/space.py", "import neural_mp.io.files", "amp, space, search and strategies are"),
    ("space/space.py", "import torch", "amp, space, search and strategies are pure"),
    ("adaptors/pytorch/convert.py", "import neural_mp.tuning.baseline", "adaptors do not import"),
    ("adaptors/common/kernels/fusion.py", "import neural_mp.strategies", "adaptors do not import"),
    (
        "adaptors/pytorch/graph/casts.py",
        "import neural_mp.adaptors.pytorch.capture",
        "rooms of the Py",
    ),
    (
        "adaptors/common/quant_params.py",
        "import neural_mp.adaptors.common.weights",
        "rooms of adaptors",
    ),
    ("tuning/evaluation/batches.py", "import neural_mp.tuning.measurement", "rooms of tuning"),
    ("adaptors/pytorch/convert.py", "import neural_mp.adaptors.tensorflow", "are independent"),
    (
        "adaptors/tensorflow/graph/ops.py",
        "import neural_mp.adaptors.tensorflow.model",
        "are layers",
    ),
    (
        "adaptors/onnxrt/files/storage.py",
        "import neural_mp.adaptors.onnxrt.targets",
        "ONNX Runtime adaptor are layers",
    ),
    ("adaptors/common/kernels/fusion.py", "import neural_mp.adaptors.onnxrt", "is framework-free"),
    ("adaptors/common/conversion.py", "import onnx", "adaptors.common is framework-free"),
    ("tuning/tuner.py", "import neural_mp.adaptors.pytorch", "adaptors.contract only"),
    ("tuning/tuner.py", "import neural_mp.adaptors.common.kernels", "adaptors.contract only"),
    ("tuning/baseline.py", "import neural_mp.metrics.predictions", "adaptors.contract only"),
    ("common.py", "import torch", "a framework is imported only inside its adaptor"),
]


@pytest.fixture(scope="module")
def broken(tmp_path_factory) -> dict[str, str]:
    """Contract → what is said about it where every line of `BREACHES` is added."""
    folder = tmp_path_factory.mktemp("broken")
    shutil.copytree(ROOT / "neural_mp", folder / "neural_mp")
    shutil.copy(ROOT / "pyproject.toml", folder)
    for module, line, _ in BREACHES:
        with (folder / "neural_mp" / module).open("a") as file:
            file.write(f"\n{line}\n")
    result = run(tool("lint-imports"), "--no-cache", cwd=folder)
    assert result.returncode != 0
    parts = re.split(r"\n(.+)\n-+\n\n", result.stdout.partition("Broken contracts")[2])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize(("module", "line", "contract"), BREACHES)
def test_breaking_an_import_contract_is_seen(broken, module, line, contract):
    importer = "neural_mp." + module.removesuffix(".py").replace("/", ".")
    imported = line.rpartition("import ")[2]
    messages = [text for name, text in broken.items() if contract in name]
    words = " ".join("".join(messages).split())  # long lines are wrapped
    assert f"{importer} -> {imported} " in words, broken


def test_the_linter_is_content():
    result = run(tool("ruff"), "check", ".")
    assert result.returncode == 0, result.stdout


def test_the_formatter_is_content():
    result = run(tool("ruff"), "format", "--check", ".")
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_the_types_fit():
    result = run(sys.executable, "-m", "mypy")
    assert result.returncode == 0, result.stdout


def test_no_file_is_long():
    long = {
        str(file.relative_to(ROOT)): count
        for file in (ROOT / "neural_mp").rglob("*.py")
        if (count := len(file.read_text().splitlines())) > 600
    }
    assert not long


def packed(source: str) -> list[int]:
    """Return the lines that pack arguments or items as `*( … )`, in place of one per line."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple)
    ]


def test_arguments_and_items_are_not_packed():
    assert packed("print(*(1, 2), *items)\n") == [1]
    folders = ("neural_mp", "tests", "benchmarks")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    lines = {str(file.relative_to(ROOT)): packed(file.read_text()) for file in files}
    assert not {name: numbers for name, numbers in lines.items() if numbers}


def bare_class_variables(source: str) -> list[int]:
    """Return the lines that annotate a `ClassVar` of no type, which Python 3.10 cannot resolve."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.annotation, ast.Name)
        and node.annotation.id == "ClassVar"
    ]


def test_class_variables_name_their_type():
    assert bare_class_variables("a: ClassVar[int] = 1\nb: ClassVar = 2\n") == [2]
    files = (ROOT / "neural_mp").rglob("*.py")
    lines = {str(file.relative_to(ROOT)): bare_class_variables(file.read_text()) for file in files}
    assert not {name: numbers for name, numbers in lines.items() if numbers}


#: Participles, adverbs and pronouns, which are no names of values by themselves.
VAGUE_NAMES = frozenset(
    [
        "found",
        "given",
        "made",
        "said",
        "told",
        "asked",
        "wanted",
        "taken",
        "known",
        "kept",
        "there",
        "here",
        "place",
        "places",
        "each",
        "one",
        "other",
        "others",
        "word",
        "words",
        "way",
        "ways",
        "seen",
        "left",
        "held",
        "gone",
        "fits",
        "both",
        "alone",
        "beside",
        "before",
        "after",
        "read",
        "owner",
        "turned",
        "close",
        "near",
    ]
)
#: Share of vague names among all local names: some are a convention, as in `__eq__(self, other)`.
MAX_VAGUE_RATIO = 0.015


def local_names(source: str) -> list[str]:
    """Return the names that each function binds."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            bound = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and _is_stored(n)}
            names += bound | {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
    return names


def _is_stored(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def test_local_names_are_nouns():
    assert VAGUE_NAMES & set(local_names("def f(given):\n    found = given\n")) == {
        "given",
        "found",
    }
    for folder in ("neural_mp", "tests", "benchmarks"):
        files = (ROOT / folder).rglob("*.py")
        names = [name for file in files for name in local_names(file.read_text())]
        vague = [name for name in names if name in VAGUE_NAMES]
        assert len(vague) <= MAX_VAGUE_RATIO * len(names), Counter(vague).most_common(10)


def imported(folder: Path) -> set[str]:
    """The first names of all that the files of a folder import."""
    nodes = [n for file in folder.rglob("*.py") for n in ast.walk(ast.parse(file.read_text()))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) if node.module}
    return {name.partition(".")[0] for name in names}


def modules(folder: Path) -> set[str]:
    """The names by which the files of a folder can be imported."""
    return {path.stem for path in folder.rglob("*") if path.suffix in ("", ".py")}


def installed() -> set[str]:
    """The names of packages, those of Python included."""
    return {*packages_distributions(), *sys.stdlib_module_names}


def test_benchmarks_import_no_tests_and_tests_no_benchmarks():
    tests, benchmarks = ROOT / "tests", ROOT / "benchmarks"
    assert "benchmarks" not in imported(tests)
    assert "benchmarks" in imported(benchmarks)
    assert not imported(benchmarks) & {"tests", *modules(tests)} - installed()


def test_files_of_tests_and_benchmarks_shadow_no_package():
    files = [file for name in ("tests", "benchmarks") for file in (ROOT / name).rglob("*.py")]
    assert not {file.stem for file in files} & installed()


def test_the_plug_in_families_are_in_sight_from_the_root():
    assert (ROOT / "adaptors").resolve() == ROOT / "neural_mp" / "adaptors"
    assert (ROOT / "strategies").resolve() == ROOT / "neural_mp" / "strategies"
