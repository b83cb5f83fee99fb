"""The site of `docs/` as a browser gets it: built without warnings, every link alive."""

import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import neural_mp
from neural_mp import errors, training

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)


def build(root, site):
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
    )


class Page(HTMLParser):
    """What a page of the site links to, what it fetches, and the anchors that it has."""

    def __init__(self, file):
        super().__init__()
        self.links, self.fetched, self.anchors = [], [], set()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if "id" in values:
            self.anchors.add(values["id"])
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in ("img", "link", "script", "iframe"):
            self.fetched += [values[name] for name in ("src", "href") if values.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def pages(site):
    # The page for addresses that do not exist is read at any depth: its links begin with a slash.
    return {file: Page(file) for file in site.rglob("*.html") if file.name != "404.html"}


def test_the_site_has_a_page_for_every_page_of_docs(site):
    for page in (ROOT / "docs").rglob("*.md"):
        path = page.relative_to(ROOT / "docs").with_suffix("")
        assert (site / ("" if path.name == "index" else path) / "index.html").is_file(), path
    for readme in (ROOT / "examples").glob("*/README.md"):
        assert (site / readme.parent.relative_to(ROOT) / "index.html").is_file()


def test_every_link_and_every_anchor_of_the_built_site_leads_somewhere(pages):
    broken = []
    for file, page in pages.items():
        for link in (*page.links, *page.fetched):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else ()
            missing_anchor = parts.fragment and unquote(parts.fragment) not in anchors
            if not target.exists() or (missing_anchor and parts.fragment != "__skip"):
                broken.append((str(file.relative_to(file.parents[1])), link))
    assert not broken


def test_a_page_fetches_nothing_from_elsewhere_and_tells_no_path_of_the_machine(site, pages):
    for page in pages.values():
        assert not [address for address in page.fetched if urlsplit(address).netloc]
    for file in site.rglob("*"):
        if file.suffix in (".html", ".json", ".xml", ".svg"):
            text = file.read_text(encoding="utf-8")
            assert not [name for name in ("docs", "neural_mp") if f"{ROOT}/{name}" in text], file


#: Adds to the body of a page the widths of code that is wider than its block.
PROBE = """<script>
addEventListener("load", () => {
  const blocks = [...document.querySelectorAll("pre code")];
  const clipped = blocks.filter(code => code.scrollWidth > code.clientWidth + 1);
  document.body.dataset.clipped = clipped.map(code => code.textContent).join("\\n");
  document.body.dataset.blocks = blocks.length;
});
</script></body>"""


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")
@pytest.mark.parametrize("page", ["", "readme", "tasks", "tasks/classification", "guide"])
def test_lines_of_code_are_whole_in_a_window_of_1400_pixels(site, page):
    file = site / page / "index.html"
    probe = file.with_name("probe.htm")  # other tests read all files that end in .html
    probe.write_text(file.read_text(encoding="utf-8").replace("</body>", PROBE), encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000"]
    done = subprocess.run(
        [str(BROWSER), *options, "--dump-dom", probe.as_uri()], capture_output=True, text=True
    )
    probe.unlink()
    body = re.search(r'<body[^>]* data-clipped="([^"]*)" data-blocks="(\d+)"', done.stdout)
    assert body, done.stderr[-2000:]
    assert body[1] == ""
    assert int(body[2]) > 0 or page == "tasks"


def test_the_search_finds_data_frames_masks_and_sigterm_by_a_title(site):
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))
    titles = {document["title"]: document["location"] for document in index["docs"]}
    assert titles["SIGTERM"] == "guide/#sigterm"
    assert titles["Images with masks"] == "data_and_metrics/#images-with-masks"
    assert "Data frames" in titles


def test_the_reference_describes_every_public_name(pages):
    anchors = set().union(*(page.anchors for page in pages.values()))
    elsewhere = {
        "common": "common.DataLoader",
        "NeuralMPError": "errors.NeuralMPError",
        # Of the API, which `training` may only import when they are used.
        "training.finish": "api.quantization_aware.finish",
        "training.quantization_aware": "api.quantization_aware.quantization_aware",
    }
    names = [*neural_mp.__all__, *(f"training.{name}" for name in training.__all__)]
    public = [f"neural_mp.{elsewhere.get(name, name)}" for name in names]
    public += [
        f"neural_mp.errors.{name}"
        for name, item in vars(errors).items()
        if isinstance(item, type) and issubclass(item, errors.NeuralMPError)
    ]
    assert not [name for name in public if name not in anchors]
    assert "neural_mp.MixedPrecision.fit" in anchors


def test_a_broken_link_fails_the_build(tmp_path):
    """A copy without the API reference, whose pages are slow to build."""
    for name in ("docs", "conf", "benchmarks", "examples"):
        left_out = shutil.ignore_patterns("out", "__pycache__")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=left_out)
    for file in (*ROOT.glob("*.md"), ROOT / "LICENSE"):
        shutil.copy(file, tmp_path)
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    without_reference, count = re.subn(r"  - mkdocstrings:\n(?: {6}.*\n)+", "", settings)
    assert count == 1
    (tmp_path / "mkdocs.yml").write_text(without_reference, encoding="utf-8")
    page = tmp_path / "docs" / "guide.md"
    broken = "\n[no page](nowhere.md) [no file](../nowhere.py) [no part](plans.md#nowhere)\n"
    page.write_text(page.read_text(encoding="utf-8") + broken, encoding="utf-8")
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    warnings = [line for line in done.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == 3
    for target in ("nowhere.md", "nowhere.py", "plans.md#nowhere"):
        assert any(target in warning for warning in warnings)
