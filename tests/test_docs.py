"""What the documentation shows, runs; what it links to, is there."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from examples_here import without_figures
from machine import has_rewrite_pass
from quick_runs import (
    export_once,
    load_once,
    make_quick,
    search_briefly,
    trace_once,
)

from neural_mp.api import compare, replay
from neural_mp.config import load_settings
from neural_mp.core import hardware
from neural_mp.core.plan import PrecisionPlan
from neural_mp.targets import load_profile
from neural_mp.testing import Split

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
#: The CPU flags that stand for BF16 and FP16.
SIXTEEN_BITS = {
    flag
    for precision, flags in hardware.NATIVE_FLAGS.items()
    if precision.is_16_bit
    for flag in flags
}
#: Pages that another test runs, and which.
ELSEWHERE = {"data_and_metrics.md": "data/test_reference_snippets.py"}
#: Folders of pages.
FOLDERS = (
    ".",
    "docs",
    "docs/api",
    "docs/tasks",
    "conf",
    "benchmarks",
    "examples",
    "examples/*",
)
PAGES = sorted(page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md"))


class Metric:
    """The metric that the pages leave to the reader."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.all = 0

    def update(self, preds, labels):
        self.right += int((np.asarray(preds).argmax(1) == np.asarray(labels)).sum())
        self.all += len(labels)

    def result(self):
        return self.right / self.all


def blocks(page, *languages):
    """`(language, text)` of every fenced block in one of the languages, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    matches = re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    return [(language, block) for language, block in matches if language in languages]


#: Every page that shows Python or YAML; a new one is among them by itself.
RUN = [
    page
    for folder in (".", "tasks")
    for file in sorted((ROOT / "docs" / folder).glob("*.md"))
    for page in [file.relative_to(ROOT / "docs").as_posix()]
    if page not in ELSEWHERE and blocks(page, "python", "yaml")
]


def file_name(block):
    """The file that a block says it is, in a comment on its first line."""
    named = re.match(r"# ([\w.]+\.(?:py|yaml))\n", block)
    return named and named[1]


@pytest.fixture
def reader(tmp_path, monkeypatch, net, digits):
    """What a reader has at hand: a model, data, a metric, and a folder to write modules in.

    And a machine without 16 bits, which a page that needs them has to force itself.
    """
    make_quick(monkeypatch)
    for module in (compare, replay):
        monkeypatch.setattr(module, "load_source", load_once)
    export_once(monkeypatch)
    search_briefly(monkeypatch)
    trace_once(monkeypatch)
    lesser = replace(hardware.detect({}), flags=hardware.detect({}).flags - SIXTEEN_BITS)
    monkeypatch.setattr(hardware, "_detect_machine", lambda: lesser)
    for variable in hardware.FORCE_VARIABLES.values():
        monkeypatch.setenv(variable, "0")  # and back to what it was, whatever a page sets
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    modules, handler = set(sys.modules), signal.getsignal(signal.SIGTERM)
    train, test = (Split(split.images[:300], split.labels[:300]) for split in digits)
    for name, split in (("train", train), ("test", test)):
        np.savez(tmp_path / f"{name}.npz", inputs=split.images, labels=split.labels)
    yield {
        "__name__": "reader",
        "model": net,
        "dataset": test,
        "images": test.images[:50].transpose(0, 2, 3, 1),
        "calib_dataset": train,
        "Metric": Metric,
    }
    signal.signal(signal.SIGTERM, handler)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", None)).startswith(str(tmp_path)):
            del sys.modules[name]


def install(folder, page):
    """The entry points that a page shows, as an installed package would bring them."""
    shown = "\n".join(block for _, block in blocks(page, "toml"))
    groups = re.sub(r'\[project\.entry-points\."(.+)"\]', r"[\1]", shown)
    package = folder / "shown-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: shown\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(groups.replace('"', ""))


@pytest.mark.parametrize("page", RUN)
def test_the_code_of_a_page_runs_in_order(page, reader, tmp_path, capsys):
    install(tmp_path, page)
    shown = blocks(page, "python", "yaml")
    for _, block in shown:
        if name := file_name(block):
            (tmp_path / name).write_text(block, encoding="utf-8")
    for index, (language, block) in enumerate(shown):
        if "graph_rewrite(" in block and not has_rewrite_pass():
            continue  # the page shows what this machine has not
        if language == "python" and not file_name(block):
            exec(compile(block, f"{page}, block {index}", "exec"), reader)
    if any("result = converter()" in block for _, block in shown):
        assert reader["result"].plan
    if page.startswith("tasks/"):
        assert reader["result"].met
        assert any(precision.is_integer for precision in reader["result"].plan.counts())
        output = "".join(block for _, block in blocks(page, "text"))
        assert without_figures(capsys.readouterr().out) == without_figures(output)


def test_the_home_page_names_every_page_by_its_title():
    home = ROOT / "docs" / "index.md"
    links = re.findall(r"\| \[([^\]]+)\]\(([\w./]+\.md)\) \|", home.read_text(encoding="utf-8"))
    assert len(links) > 25
    for text, target in links:
        title = (home.parent / target).read_text(encoding="utf-8").splitlines()[0]
        assert text == title.removeprefix("# "), target


def test_the_readme_is_a_path_of_at_most_ten_links_and_the_home_page_names_the_rest():
    """The path begins with the tasks; frameworks and migrations are rows of the home page."""
    readme, home = (ROOT / name for name in ("README.md", "docs/index.md"))
    link = re.compile(r"(?<!!)\[[^\]]+\]\(([^)]+)\)")
    path = link.findall(readme.read_text(encoding="utf-8"))
    assert path[:3] == ["docs/tasks/index.md", "docs/guide.md", "docs/faq.md"]
    assert len(path) <= 10
    targets = {target.partition("#")[0] for target in link.findall(home.read_text("utf-8"))}
    pages = {file.name for file in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages <= targets


@pytest.mark.parametrize("words", ["Data frames", "Images with masks", "SIGTERM"])
def test_the_home_page_leads_to_a_heading_of_these_words_in_one_step(words):
    home = ROOT / "docs" / "index.md"
    text = home.read_text(encoding="utf-8")
    ((page, anchor),) = re.findall(rf"\| \[{words}\]\(([\w./]+\.md)#([\w-]+)\) \|", text)
    target = (home.parent / page).read_text(encoding="utf-8")
    assert re.search(rf"^#+ {words}$", target, flags=re.MULTILINE)
    assert anchor in anchors(home.parent / page)


def test_a_strategy_of_the_page_was_found_by_its_entry_point(tmp_path, reader):
    from neural_mp.adaptors.registry import list_framework_names
    from neural_mp.metrics import METRICS
    from neural_mp.strategies import create_strategy_named
    from neural_mp.tuning.executors import get_executor_named

    install(tmp_path, "extending.md")
    for _, block in blocks("extending.md", "python"):
        if name := file_name(block):
            (tmp_path / name).write_text(block, encoding="utf-8")
    assert type(create_strategy_named("bisect")).__module__ == "bisect_strategy"
    assert "sklearn_mlp" in list_framework_names()
    assert get_executor_named("inline").__module__ == "inline_executor"
    assert METRICS.find_factory("worst_class").__module__ == "my_code"


def test_the_adaptor_of_the_page_keeps_the_contract_that_is_shipped(tmp_path):
    install(tmp_path, "extending.md")
    for _, block in blocks("extending.md", "python"):
        if name := file_name(block):
            (tmp_path / name).write_text(block, encoding="utf-8")
    paths = os.pathsep.join((str(tmp_path), str(ROOT), os.environ["PYTHONPATH"]))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mlp_adaptor.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    (count,) = re.findall(r"(\d+) passed", done.stdout)
    assert int(count) >= 16


@pytest.mark.parametrize(
    ("page", "block"), [(page, block) for page in RUN for _, block in blocks(page, "yaml")]
)
def test_yaml_is_read_as_what_it_shows(page, block, tmp_path, monkeypatch):
    install(tmp_path, page)
    monkeypatch.syspath_prepend(tmp_path)
    content = yaml.safe_load(block)
    if "schema" in content:
        (tmp_path / "profile.yaml").write_text(block, encoding="utf-8")
        load_profile(str(tmp_path / "profile.yaml"))
    elif "ops" in content:
        assert PrecisionPlan.from_yaml(yaml.safe_dump({"neural_mp_plan": 2, **content}))
    else:
        (tmp_path / "shown.yaml").write_text(block, encoding="utf-8")
        load_settings(tmp_path / "shown.yaml")


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    broken = []
    for link in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_the_python_of_the_readme_runs(reader):
    """Its first block is on the reader's PyTorch net; the second trains a Keras model."""
    import keras

    tuning, training = blocks("../README.md", "python")
    reader["images"] = dataset_images = reader["dataset"].images[:50]
    exec(compile(tuning[1], "README.md, tuning", "exec"), reader)
    assert reader["optimized"](dataset_images).shape == (50, 10)

    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Dense(16, activation="relu")(keras.layers.Flatten()(inputs))
    net = keras.Model(inputs, keras.layers.Dense(10, activation="softmax")(hidden))
    net.compile("adam", "sparse_categorical_crossentropy")
    split = reader["calib_dataset"]
    images, labels = split.images.transpose(0, 2, 3, 1), split.labels
    batches = [(images[i : i + 60], labels[i : i + 60]) for i in range(0, 300, 60)]
    names = {"model": net, "images": images, "labels": labels, "batches": batches}
    exec(compile(training[1], "README.md, training", "exec"), names)
    assert names["advice"].plan
