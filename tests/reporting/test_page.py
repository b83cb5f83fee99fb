"""The page of a run, as a browser reads it, without one."""

from __future__ import annotations

import base64
import cProfile
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import page_records
import pytest

from neural_mp.core.trial import Outcome
from neural_mp.errors import NeuralMPError
from neural_mp.reporting.page import cell_of, page_of, write_page
from neural_mp.reporting.page.page_model import View
from neural_mp.reporting.page.trials_section import draw_trials_chart

HOSTILE = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\"'><svg onload=alert(1)>",
    "]]></title></style><b>",
    "\u202egnp.exe\u2066",
    "\x00\x1b[31m\ud800",
    "&lt;i&gt; &amp;",
    "名前 · اسم",
    "${alert(1)}`\\u003c/script>",
)
EMPTY = {"meta", "input", "br", "img", "link", "hr"}


class Reader(HTMLParser):
    """What a browser finds in a page.

    Attributes:
        elements: every tag with its attributes.
        texts: tag → the texts right in such elements.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"not closed: {self._open}"

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.texts.setdefault(tag, [])
        if tag not in EMPTY:
            self._open.append(tag)
            self.texts[tag].append("")

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open:
            self.texts[self._open[-1]][-1] += data

    @property
    def tags(self) -> set[str]:
        return {tag for tag, _ in self.elements}

    def data(self) -> dict:
        ((attributes, text),) = [
            (attrs, text)
            for (_, attrs), text in zip(
                [e for e in self.elements if e[0] == "script"], self.texts["script"], strict=True
            )
            if attrs.get("id") == "data"
        ]
        if "data-packed" in attributes:
            import gzip

            text = gzip.decompress(base64.b64decode(text)).decode()
        return json.loads(text)

    def words(self) -> str:
        return " ".join(
            text
            for tag, texts in self.texts.items()
            if tag not in ("script", "style")
            for text in texts
        )


@pytest.fixture(scope="module")
def graph():
    return page_records.chain(30)


@pytest.fixture(scope="module")
def page(graph):
    return page_of(page_records.record(graph))


def test_a_page_has_the_verdict_and_four_figures(page):
    text = Reader(page).words()
    assert "Target met" in text
    for figure in ("24 ms", "0.95", "1 MB", "2 MB", "3.33×"):
        assert figure in text


def test_the_tile_of_the_latency_has_the_cpu_time(graph):
    run = page_records.record(graph)
    report = replace(run.ending.report, baseline_cpu_seconds=0.15, cpu_seconds=0.06)
    run = replace(run, ending=replace(run.ending, report=report))
    assert "3.33×, 2.50× in CPU time" in Reader(page_of(run)).words()


def test_an_uncertain_trial_is_told_from_a_slow_one(graph):
    run = page_records.record(graph)
    outcomes = {Outcome.SLOW: Outcome.UNCERTAIN}
    trials = tuple(replace(t, outcome=outcomes.get(t.outcome, t.outcome)) for t in run.trials)
    for outcome, words_ in (("slow", "speed-up too small"), ("uncertain", "speed-up within noise")):
        shown = page_of(replace(run, trials=trials) if outcome == "uncertain" else run)
        assert words_ in Reader(shown).words()
        assert f"trial {outcome}" in shown


def test_a_page_shows_every_part_of_a_run(page):
    headings = Reader(page).texts["h2"]
    expected = (
        "Trials",
        "Time by op",
        "Map",
        "Sensitivity",
        "Time of single ops",
        "Finalists",
        "Predicted and measured time",
        "Conversions",
        "Ops",
        "Run",
        "Machine and versions",
    )
    assert set(expected) <= set(headings)


def test_a_page_loads_nothing_and_lets_only_its_own_script_run(page):
    reader = Reader(page)
    assert "http:" not in page
    assert "https:" not in page
    assert "src=" not in page
    assert "@import" not in page
    assert "url(" not in page
    assert not reader.tags & {"img", "link", "iframe", "object", "embed", "form", "base"}
    (policy,) = [a["content"] for t, a in reader.elements if t == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        digests = [
            base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            for text in reader.texts[tag]
        ]
        assert digests[-1] in policy
    assert not any("style" in attributes for _, attributes in reader.elements)


def test_charts_are_drawn_without_the_script(page):
    elements = Reader(page).elements
    assert sum(tag == "svg" and "viewbox" in attributes for tag, attributes in elements) > 10
    points = [attributes["data-trial"] for _, attributes in elements if "data-trial" in attributes]
    assert sorted(points) == sorted(2 * "012345")  # for wide and for narrow screens


@pytest.mark.parametrize("higher", [True, False])
def test_up_is_better_whichever_way_the_metric_goes(graph, higher):
    run = page_records.record(graph)
    sign = 1 if higher else -1
    report = replace(
        run.ending.report,
        higher_is_better=higher,
        baseline_accuracy=sign * 0.96,
        target=sign * 0.94,
    )
    trials = [replace(t, accuracy=sign * (t.accuracy or 0.5)) for t in run.trials]
    ending = replace(run.ending, report=report, finalists=())
    drawn = list(
        draw_trials_chart(View(replace(run, trials=tuple(trials), ending=ending)), False).iter()
    )
    (zone,) = [float(e.get("y")) for e in drawn if e.get("class") == "missed-zone"]
    met = [float(e.get("cy")) for e in drawn if e.get("class") == "trial met"]
    crosses = [e.get("d") for e in drawn if e.get("class") == "trial missed"]
    missed = [float(re.match(r"M[\d.]+,([\d.]+)", path)[1]) for path in crosses]
    assert met
    assert missed
    assert max(met) < zone < min(missed)  # the picture counts from its top


def test_a_page_is_light_and_dark(page):
    assert "@media (prefers-color-scheme: dark)" in page
    assert "color-scheme: light dark" in page


def test_no_name_breaks_out_of_a_page():
    graph = page_records.chain(len(HOSTILE) * 3, named=lambda i: f"{HOSTILE[i % len(HOSTILE)]}{i}")
    plain = Reader(page_of(page_records.record(page_records.chain(len(graph)))))
    for make in (page_records.record, page_records.killed):
        for bad in HOSTILE:
            run = make(graph)
            run = replace(run, setup=page_records.setup(graph, model=bad, reason=bad))
            if run.ending is not None:
                report = replace(run.ending.report, warnings=(bad,), metric=bad)
                run = replace(run, ending=replace(run.ending, report=report))
            text = page_of(run)
            text.encode()
            reader = Reader(text)
            assert reader.tags <= plain.tags | {"code"}
            assert len([t for t, _ in reader.elements if t == "script"]) == 2
            assert not any(
                name.startswith("on") for _, attributes in reader.elements for name in attributes
            )
            Reader(cell_of(run))


def test_names_cannot_turn_the_direction_of_what_is_around_them():
    graph = page_records.chain(6, named=lambda i: f"{HOSTILE[4]}{i}")
    text = page_of(page_records.record(graph))
    assert "\u202e" not in text
    assert "\u2066" not in text
    assert "\\u202egnp.exe\\u20660" in Reader(text).data()["ops"][0][0]


@pytest.mark.slow
def test_5000_ops_take_less_than_a_megabyte():
    text = page_of(page_records.record(page_records.transformer(5000)))
    assert len(text.encode()) < 1_000_000
    data = Reader(text).data()
    assert len(data["ops"]) >= 5000
    assert data["plan"].startswith("neural_mp_plan")


def count_calls(ops):
    """Return how many functions are called to write the page of so many ops."""
    run, profile = page_records.record(page_records.transformer(ops)), cProfile.Profile()
    profile.runcall(page_of, run)
    return sum(entry.callcount for entry in profile.getstats())


@pytest.mark.slow
def test_twice_the_ops_take_twice_the_work():
    page_of(page_records.record(page_records.transformer(100)))  # what is made once
    assert count_calls(1000) < 2.3 * count_calls(500)


def test_the_script_knows_what_every_op_runs_in_in_every_trial(graph):
    run = page_records.record(graph)
    data = Reader(page_of(run)).data()
    letters = {"int8": "8", "bf16": "b", "fp16": "h", "fp32": "."}
    for trial in run.trials:
        runs = run.setup.follow_plan(trial.plan).effective
        expected = "".join(letters[runs[op.name].value] for op in graph)
        assert data["plans"][str(trial.number)] == expected
    assert data["result"] == data["plans"]["0"]


def test_ops_of_one_kernel_share_a_box(graph):
    data = Reader(page_of(page_records.record(graph))).data()
    boxes = [box[2] for box in data["levels"][0]["boxes"]]
    assert sorted(op for box in boxes for op in box) == list(range(len(graph)))
    assert [0, 1] in boxes  # a convolution with its ReLU
    assert [2] in boxes


def test_the_plan_is_there_to_download_and_replays(page, graph):
    from neural_mp import PrecisionPlan

    (link,) = [a["href"] for tag, a in Reader(page).elements if tag == "a"]
    yaml = base64.b64decode(link.removeprefix("data:text/yaml;base64,")).decode()
    assert PrecisionPlan.from_yaml(yaml) == page_records.plan_of(graph)


def test_a_killed_run_has_a_page_that_says_so(graph):
    text = Reader(page_of(page_records.killed(graph))).words()
    assert "Unfinished" in text
    assert "killed, or still in progress when this page" in text
    assert "best so far" in text
    assert "Trials: accuracy against time per batch" in text
    assert "Conversions" not in text


def test_a_run_that_was_killed_before_its_first_trial_has_a_page(graph):
    empty = replace(page_records.killed(graph), trials=(), baseline=None)
    text = Reader(page_of(empty)).words()
    assert "No plan was evaluated" in text
    Reader(cell_of(empty))


def test_a_run_without_accuracy_has_a_page_without_trials(graph):
    text = Reader(page_of(page_records.unchecked(graph))).words()
    assert "Accuracy not checked" in text
    assert "41.5 dB" in text
    assert "No plan was evaluated" in text


def test_a_run_that_missed_its_target_says_that_the_result_is_the_fp32_model(graph):
    run = page_records.missed(graph)
    reader = Reader(page_of(run))
    assert "Target not met" in reader.words()
    assert "the result is the FP32 model" in reader.words()
    assert set(reader.data()["result"]) == {"."}
    slow = replace(run.trials[0], outcome=Outcome.SLOW)
    report = replace(run.ending.report, best_rejected=slow)
    run = replace(run, ending=replace(run.ending, report=report))
    assert "No faster plan" in Reader(page_of(run)).words()


def test_numbers_that_are_none_do_not_stop_a_page(graph):
    run = page_records.record(graph)
    nothing = float("nan")
    noise = dict.fromkeys(run.observations.nsr, nothing)
    first, *remaining = run.trials
    run = replace(
        run,
        observations=replace(run.observations, nsr=noise),
        trials=(*remaining, replace(first, accuracy=nothing, number=9)),
    )
    assert "NaN" not in re.sub(r"<script.*?</script>", "", page_of(run), flags=re.S)


def test_a_cell_has_no_script_and_its_styles_stay_inside(graph):
    for make in (page_records.record, page_records.killed, page_records.unchecked):
        cell = cell_of(make(graph))
        reader = Reader(cell)
        assert "script" not in reader.tags
        assert not any("id" in attributes for _, attributes in reader.elements)
        (style,) = reader.texts["style"]
        style = re.sub(r"/\*.*?\*/", "", style, flags=re.S)
        rules = re.findall(r"([^{}]+)\{", style)
        selectors = [part.strip() for rule in rules for part in rule.split(",")]
        remaining = [part for part in selectors if part and not part.startswith("@media")]
        assert remaining
        assert all(part.startswith(".nmp") for part in remaining)


def test_a_page_is_written_with_the_folders_on_its_way(tmp_path, page):
    write_page(tmp_path / "a" / "b.html", page)
    assert (tmp_path / "a" / "b.html").read_text(encoding="utf-8") == page
    (tmp_path / "file").write_text("")
    with pytest.raises(NeuralMPError, match="cannot be written"):
        write_page(tmp_path / "file" / "b.html", page)
