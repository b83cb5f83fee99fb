"""One storage keeps the runs of many models, each model's for itself."""

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import optuna
import pytest
import sqlalchemy

from neural_mp import MixedPrecision
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import HistoryError
from neural_mp.runs.history import History, get_storage_url, read_record
from neural_mp.runs.registry import run_names
from neural_mp.util.optional_packages import silence_optuna_log

FIRST, SECOND = "1" * 16, "2" * 16


@pytest.fixture
def url(tmp_path):
    return get_storage_url(tmp_path / "shared")


@pytest.fixture
def begin(url):
    """A run about a model, begun or gone on with."""

    def begun(model, resume=False, **about):
        return History(url, {"model": model, "criterion": "1 %", **about}, True, resume)

    return begun


def tried(history, accuracy):
    plan = PrecisionPlan({"conv": OpConfig(Precision.BF16)})
    history.finish_trial(Trial(plan, Outcome.MET, accuracy, number=history.begin_trial()))


@pytest.mark.slow
def test_after_a_run_of_another_model_the_first_is_resumed(net, deep, digits, accuracy, tmp_path):
    def converter(model, **options):
        return MixedPrecision(
            model=model,
            precisions="int8",
            objective="modelsize",
            metric=accuracy,
            eval_dataloader=digits[1].loader(),
            workspace=tmp_path / "shared",
            **options,
        )

    first = converter(net)()
    second = converter(deep)()
    spent = accuracy.evaluations
    resumed = converter(net, resume=True)()
    assert accuracy.evaluations == spent
    assert resumed.plan == first.plan
    assert resumed.record.name == first.record.name
    assert first.record.name.endswith("/tuning-0001")
    assert second.record.name.endswith("/tuning-0001")
    assert first.record.name != second.record.name


def test_runs_are_counted_for_every_model(begin):
    names = [begin(model).name for model in (FIRST, SECOND, FIRST, FIRST)]
    first, second = FIRST[:12], SECOND[:12]
    assert names == [
        f"{first}/tuning-0001",
        f"{second}/tuning-0001",
        f"{first}/tuning-0002",
        f"{first}/tuning-0003",
    ]


def test_of_two_runs_of_a_model_the_one_about_the_same_is_resumed(begin):
    tried(begin(FIRST), 0.9)
    begin(FIRST, criterion="2 %")
    resumed = begin(FIRST, resume=True)
    assert resumed.name.endswith("tuning-0001")
    assert [trial.accuracy for trial in resumed.read_trials()] == [0.9]
    with pytest.raises(HistoryError, match="the criterion of this run differs from that of .*0002"):
        begin(FIRST, resume=True, criterion="3 %")


def test_a_model_without_runs_cannot_be_resumed(begin):
    with pytest.raises(HistoryError, match="there is no run to resume"):
        begin(FIRST, resume=True)
    begin(FIRST)
    with pytest.raises(HistoryError, match="cannot resume: the model of this run differ"):
        begin(SECOND, resume=True)


def test_a_record_is_chosen_by_number_and_model(begin, url):
    names = [begin(model).name for model in (FIRST, SECOND, SECOND)]

    def read(*chosen):
        with pytest.raises(HistoryError) as refused:
            read_record(url, *chosen)
        return str(refused.value)

    # These runs were never begun in earnest; the message says which of them was meant.
    assert names[2] in read()
    assert names[1] in read(1, "22")
    assert names[0] in read(None, "1")
    assert "there are runs 1 of several models" in read(1)
    assert f"latest first: {SECOND[:12]}, {FIRST[:12]}" in read(1)
    assert "there is no run of a model 'abc'" in read(None, "abc")
    assert "there is no run 7" in read(7)


def test_what_calibration_saw_is_kept_small(begin, url):
    observations = Observations(samples=3, nsr={f"layer{n}.conv": n / 7 for n in range(2000)})
    history = begin(FIRST)
    history.observations = observations
    history.close()
    assert begin(FIRST, resume=True).observations == observations
    with silence_optuna_log():
        study = optuna.load_study(study_name=history.name, storage=url)
        bare = json.dumps(observations.to_dict())
        assert len(study.user_attrs["observations"]) < 0.5 * len(bare)
        # As earlier versions kept it.
        study.set_user_attr("observations", bare)
    assert begin(FIRST, resume=True).observations == observations


@contextmanager
def recorded_statements():
    """SQL statements of this thread: that of a heartbeat has its own."""
    statements, thread = [], threading.get_ident()

    def record(connection, cursor, statement, *_):
        if threading.get_ident() == thread:
            statements.append(statement)

    sqlalchemy.event.listen(sqlalchemy.Engine, "before_cursor_execute", record)
    yield statements
    sqlalchemy.event.remove(sqlalchemy.Engine, "before_cursor_execute", record)


def test_ten_thousand_runs_are_listed_by_as_many_statements_as_few(begin, url):
    def begin_another():
        with recorded_statements() as statements:
            name = begin(SECOND).name
            count = len(run_names(url, f"{7:012x}"))
        return name.removeprefix(f"{SECOND[:12]}/"), count, len(statements)

    begin(FIRST)
    begin(SECOND)
    *few, statements = begin_another()
    with sqlalchemy.create_engine(url).begin() as connection:
        insert = sqlalchemy.text("INSERT INTO neural_mp_runs (name) VALUES (:name)")
        rows = [{"name": f"{n % 100:012x}/tuning-{n // 100 + 1:04d}"} for n in range(10_000)]
        connection.execute(insert, rows)
    assert len(run_names(url)) == 10_003
    assert few == ["tuning-0002", 0]
    assert begin_another() == ("tuning-0003", 100, statements)


@pytest.mark.slow
def test_many_open_a_new_storage_at_once(tmp_path):
    for index in range(4):
        url, together = get_storage_url(tmp_path / str(index)), threading.Barrier(4)

        def opened(url=url, together=together):
            together.wait()
            with History(url, {"model": FIRST}, higher_is_better=True) as history:
                return history.name

        with ThreadPoolExecutor(4) as pool:
            names = sorted(future.result() for future in [pool.submit(opened) for _ in range(4)])
        assert names == [f"{FIRST[:12]}/tuning-000{number}" for number in (1, 2, 3, 4)]


ENDLESS = "WITH RECURSIVE r(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM r) SELECT i"
TRIALS = (
    f"DROP TABLE trials; CREATE VIEW trials AS {ENDLESS} AS trial_id, i AS number, 1 AS study_id, "
    f"'COMPLETE' AS state, NULL AS datetime_start, NULL AS datetime_complete FROM r"
)
SLOW = " AND ".join(["length(hex(randomblob(400000000))) > 0"] * 300)
COMPUTING = {
    "a view": TRIALS,
    "a view of versions": (
        f"DROP TABLE version_info; CREATE VIEW version_info AS {ENDLESS} AS version_info_id, "
        f"i AS schema_version, '' AS library_version FROM r"
    ),
    "a trigger": (
        f"CREATE TRIGGER mine AFTER INSERT ON study_user_attributes BEGIN "
        f"INSERT INTO trial_heartbeats {ENDLESS}, i, i FROM r; END"
    ),
    "a virtual table": "CREATE VIRTUAL TABLE mine USING rtree(id, low, high)",
    "a computed column": "CREATE TABLE mine (a TEXT, b TEXT AS (hex(zeroblob(400000000))))",
    "a constraint": f"CREATE TABLE mine (a TEXT, CHECK ({SLOW}))",
    "a constraint of a column": f"CREATE TABLE mine (a TEXT CHECK ({SLOW}))",
    "a constraint that names a function": "CREATE TABLE mine (a TEXT, CHECK (random() = 1))",
    "a constraint of a known table": (
        "DROP TABLE version_info; CREATE TABLE version_info (version_info_id INTEGER NOT NULL "
        "PRIMARY KEY, schema_version INTEGER, library_version VARCHAR(256), "
        f"CHECK (version_info_id=1), CHECK ({SLOW}))"
    ),
    "a default": f"CREATE TABLE mine (a TEXT, b INTEGER DEFAULT ({SLOW}))",
    "an index of an expression": "CREATE INDEX mine ON studies (hex(study_name))",
    "an index of some rows": f"CREATE INDEX mine ON studies (study_name) WHERE {SLOW}",
    "a table of a query": "CREATE TABLE mine AS SELECT 1 AS a; CREATE INDEX i ON mine (a + 1)",
}
#: Statements that store values only.
PLAIN = (
    "CREATE TABLE mine (a VARCHAR(8) NOT NULL, CONSTRAINT kinds CHECK (a IN ('X', 'Y')))",
    "CREATE TABLE mine (a NUMERIC(8, 2), FOREIGN KEY(a) REFERENCES trials (trial_id))",
    'CREATE TABLE "my own" (id INTEGER PRIMARY KEY AUTOINCREMENT, "key" TEXT UNIQUE)',
    "CREATE UNIQUE INDEX mine ON studies (study_name, study_id)",
)


@pytest.mark.parametrize("what", COMPUTING)
def test_a_storage_in_which_something_computes_is_refused_before_it_does(what, begin, url):
    begin(FIRST).close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        try:
            connection.executescript(COMPUTING[what])
        except sqlite3.OperationalError as error:
            pytest.skip(str(error))
    connection.close()
    for call in (lambda: read_record(url), lambda: begin(FIRST), lambda: begin(FIRST, resume=True)):
        with pytest.raises(HistoryError, match="must contain plain tables only"):
            call()


@pytest.mark.parametrize("statement", PLAIN)
def test_further_tables_that_store_values_are_taken(statement, begin, url):
    begin(FIRST).close()
    with sqlite3.connect(url.removeprefix("sqlite:///")) as connection:
        connection.executescript(statement)
    connection.close()
    begin(FIRST, resume=True).close()


def test_a_workspace_that_links_to_itself_is_one_error(tmp_path):
    (tmp_path / "history.db").symlink_to("history.db")
    with pytest.raises(HistoryError, match="cannot be opened"):
        read_record(get_storage_url(tmp_path))
