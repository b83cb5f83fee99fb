"""Pages in a real browser, where there is one."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from dataclasses import replace
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import page_records
import pytest

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32
from neural_mp.reporting.page import build_comparison_page, cell_of, page_of
from neural_mp.reporting.page.document import build_jobs_page
from neural_mp.tuning.job_outcome import JobOutcome, JobStatus

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here"),
]

#: Shows pages one after the other in a frame, and tells what became of them.
LOOKER = """<!doctype html><body><script>
const act = (inside, view) => { ACTIONS };
const shown = (page, width) => new Promise(done => {
  const frame = document.createElement("iframe");
  Object.assign(frame, {width, height: 900, src: page});
  frame.onload = () => setTimeout(() => {
    const inside = frame.contentDocument, view = frame.contentWindow;
    const paints = view.performance.getEntriesByName("first-contentful-paint");
    done({page, width, did: act(inside, view), wide: inside.documentElement.scrollWidth,
      rows: inside.querySelectorAll("#ops tbody tr").length,
      legend: inside.querySelector("#maplegend")?.textContent,
      paint: paints.length ? paints[0].startTime : null});
    frame.remove();
  }, 400);
  document.body.append(frame);
});
(async () => {
  const found = [];
  for (const [page, width] of ASKED) found.push(await shown(page, width));
  fetch("found", {method: "POST", body: JSON.stringify(found)});
})();
</script></body>"""


class _Server(SimpleHTTPRequestHandler):
    """Serves a folder, and notes what it was asked for."""

    asked: list[str]
    answers: queue.Queue

    def do_GET(self):
        self.asked.append(self.path)
        super().do_GET()

    def do_POST(self):
        length = int(self.headers["Content-Length"])
        self.answers.put(json.loads(self.rfile.read(length)))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def looked_at(tmp_path):
    """Look at pages: file → its text; each at every width.

    What was seen of each, what was asked of the server, and what the console says.
    """

    def call(
        pages: dict[str, str], widths: tuple[int, ...], actions: str = ""
    ) -> tuple[list[dict], list[str], list[str]]:
        folder = tmp_path / "pages"
        folder.mkdir()
        for name, text in pages.items():
            (folder / name).write_text(text, encoding="utf-8")
        views = json.dumps([(name, width) for name in pages for width in widths])
        (folder / "looker.html").write_text(
            LOOKER.replace("ASKED", views).replace("ACTIONS", actions)
        )
        handler = type("Handler", (_Server,), {"asked": [], "answers": queue.Queue()})
        server = ThreadingHTTPServer(
            ("127.0.0.1", 0), lambda *arguments: handler(*arguments, directory=str(folder))
        )
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = (
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--enable-logging=stderr",
            "--disable-extensions",
            "--disable-background-networking",
            "--no-first-run",
            "--disable-component-update",
            "--disable-sync",
        )
        address = f"http://127.0.0.1:{server.server_port}/looker.html"
        profile = f"--user-data-dir={tmp_path / 'profile'}"
        with (tmp_path / "said").open("w") as log:
            browser = subprocess.Popen(
                [str(BROWSER), *options, "--remote-debugging-port=0", profile, address],
                stdout=log,
                stderr=log,
            )
            try:
                results = handler.answers.get(timeout=600)
            finally:
                browser.terminate()
                browser.wait(timeout=600)
                server.shutdown()
                server.server_close()
        lines = (tmp_path / "said").read_text(errors="replace").splitlines()
        console = [line for line in lines if "CONSOLE" in line and "favicon.ico" not in line]
        return results, handler.asked, console

    return call


def test_pages_are_drawn_without_an_error_a_request_or_scrolling_sideways(looked_at):
    graph = page_records.chain(40)
    pages = {
        "met.html": page_of(page_records.record(graph)),
        "killed.html": page_of(page_records.killed(graph)),
        "unchecked.html": page_of(page_records.unchecked(graph)),
        "missed.html": page_of(page_records.missed(graph)),
        "hostile.html": page_of(
            page_records.record(
                page_records.chain(9, named="</script><img src=x onerror=f()>{}".format)
            )
        ),
        "packed.html": page_of(page_records.record(page_records.transformer(1500))),
    }
    results, requests, console = looked_at(pages, (1400, 390))
    assert len(results) == 2 * len(pages)
    for result in results:
        assert result["wide"] <= result["width"], result
        assert result["rows"] >= 9, result
        assert "ops" in result["legend"], result
    assert {path.strip("/") for path in requests} <= {*pages, "looker.html", "favicon.ico"}
    assert not console


#: Folds the map, selects its first box and unfolds it; reads the table of a phone and of a desktop.
ACTIONS = """
const fold = inside.querySelector("#fold"), canvas = inside.querySelector("#map");
const press = key => canvas.dispatchEvent(new view.KeyboardEvent("keydown", {key}));
const cells = [...inside.querySelectorAll("#ops tbody tr:first-child td")];
const area = inside.querySelector("#ops").parentElement;
const first = fold.selectedIndex;
press("ArrowDown");
const detail = inside.querySelector("#detail").textContent;
inside.querySelector("#detail button")?.click();
return {
  first, after: fold.selectedIndex, detail, levels: fold.options.length,
  display: view.getComputedStyle(cells[1]).display,
  bar: area.offsetHeight - area.clientHeight, scrolls: area.scrollWidth > area.clientWidth,
  beside: view.getComputedStyle(cells[1], "::before").content,
};
"""


def test_500_ops_are_painted_within_a_second_unfold_by_modules_and_fit_a_phone(looked_at):
    page = page_of(page_records.record(page_records.transformer(500)))
    results, _, console = looked_at({"page.html": page}, (1400, 1400, 1400, 390), ACTIONS)
    assert not console
    *_, wide, narrow = results
    assert min(result["paint"] for result in results[:-1]) < 1000
    for result in (wide, narrow):
        did = result["did"]
        assert did["levels"] == 2
        assert did["first"] == 1
        assert did["after"] == 0  # unfolded
        assert "encoder.layer.0.attention" in did["detail"]
    assert wide["did"]["display"] == "table-cell"
    assert wide["did"]["scrolls"]
    assert wide["did"]["bar"] > 5  # a visible bar, also where the system hides them
    assert narrow["did"]["display"] == "flex"
    assert narrow["did"]["beside"] == '"type"'
    assert not narrow["did"]["scrolls"]


def test_a_notebook_cell_changes_nothing_around_it(looked_at):
    cell = cell_of(page_records.record(page_records.chain(12)))
    results, requests, console = looked_at({"cell.html": f"<!doctype html><p>{cell}"}, (390,))
    assert results[0]["wide"] <= 390
    assert not console
    assert {path.strip("/") for path in requests} <= {"cell.html", "looker.html", "favicon.ico"}


#: Room that a search field leaves for its hint, beside the button that clears the field.
ROOM = """
const pen = inside.createElement("canvas").getContext("2d");
return [...inside.querySelectorAll("input[type=search]")].map(field => {
  const style = view.getComputedStyle(field);
  pen.font = `${style.fontSize} ${style.fontFamily}`;
  const padding = parseFloat(style.paddingLeft) + parseFloat(style.paddingRight);
  return field.clientWidth - padding - 20 - pen.measureText(field.placeholder).width;
});
"""


def test_search_fields_are_as_wide_as_their_hints(looked_at):
    page = page_of(page_records.record(page_records.transformer(300)))
    results, _, _ = looked_at({"page.html": page}, (1400, 390), ROOM)
    for result in results:
        assert len(result["did"]) == 2
        assert min(result["did"]) >= 0, result


#: Pairs of labels of axes that overlap; a line of text is higher than its digits.
OVERLAPS = """
const found = [];
for (const chart of inside.querySelectorAll("svg.chart")) {
  const words = [...chart.querySelectorAll(".tick, .axis")];
  const labels = words.filter(one => one.getClientRects().length);
  const boxes = labels.map(one => one.getBoundingClientRect());
  boxes.forEach((box, at) => boxes.slice(0, at).forEach((other, before) => {
    const apart = box.left >= other.right || other.left >= box.right;
    if (!apart && Math.min(box.bottom, other.bottom) - Math.max(box.top, other.top) > 5)
      found.push([labels[before].textContent, labels[at].textContent]);
  }));
}
return found;
"""


def compared() -> str:
    """A page of two runs that differ in the precisions of five ops."""
    run = page_records.record(page_records.transformer(90))
    plan = PrecisionPlan({**run.ending.plan, **dict.fromkeys(list(run.ending.plan)[:5], FP32)})
    return build_comparison_page(
        run, replace(run, name="other", ending=replace(run.ending, plan=plan))
    )


def test_labels_of_an_axis_never_overlap(looked_at):
    pages = {
        "small.html": page_of(page_records.record(page_records.chain(40))),
        "large.html": page_of(page_records.record(page_records.transformer(500))),
        "two.html": compared(),
    }
    results, _, _ = looked_at(pages, (1400, 390), OVERLAPS)
    assert [result["did"] for result in results] == [[]] * 6


#: Widths of the names in tables, and whether the second column shows without scrolling.
NAMES = """
return [...inside.querySelectorAll("table.names-first")].map(table => {
  const [name, second] = table.querySelector("tbody tr").cells;
  const [inner, outer] = [second, table.parentElement].map(one => one.getBoundingClientRect());
  return [name.offsetWidth, inner.right <= outer.right];
});
"""


def test_names_in_tables_of_a_phone_are_legible_and_leave_room_for_the_next_column(looked_at):
    jobs = [
        JobOutcome(f"resnet50-imagenet-{i}-ecef3dab2d84", "conf.yaml", "0", status)
        for i, status in enumerate((JobStatus.MET, JobStatus.FAILED, JobStatus.BEGUN))
    ]
    page = page_of(page_records.record(page_records.transformer(90)))
    pages = {"jobs.html": build_jobs_page(jobs, {}), "two.html": compared(), "run.html": page}
    results, _, _ = looked_at(pages, (390,), NAMES)
    assert [len(result["did"]) for result in results] == [2, 1, 1]
    for result in results:
        for width, next_is_visible in result["did"]:
            assert width >= 120, result
            assert next_is_visible, result
        assert result["wide"] <= 390


def test_a_job_that_has_not_ended_has_a_reason():
    job = JobOutcome("net", "conf.yaml", "0", JobStatus.BEGUN)
    assert "not finished" in build_jobs_page([job], {})
