"""The URL of a storage may contain a password, which is shown nowhere."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from tune_many_jobs import write_jobs_into

from neural_mp import MixedPrecision
from neural_mp.errors import HistoryError, NeuralMPError, without_passwords
from neural_mp.runs.history import get_storage_url, read_record

SECRET = "s3cret"
#: Storages that cannot be opened.
URLS = (
    f"nonsense://user:{SECRET}@localhost/runs",
    f"postgresql+nothing://user:{SECRET}/:{SECRET}@localhost:1/runs",
    f"nonsense://:{SECRET}@localhost",
    f"nonsense://localhost/runs?password={SECRET}&user=me",
    f"sqlite://user:{SECRET}@localhost:1/runs",
)


@pytest.mark.parametrize("url", URLS)
def test_an_error_about_a_storage_hides_its_password(url, caplog):
    with caplog.at_level(logging.DEBUG), pytest.raises(HistoryError) as caught:
        read_record(url)
    for text in (str(caught.value), repr(caught.value), caplog.text):
        assert SECRET not in text
    assert "***" in str(caught.value)
    assert "localhost" in str(caught.value)


def test_a_storage_that_is_no_url_hides_its_password(tmp_path):
    with pytest.raises(NeuralMPError, match=r"\*\*\*") as caught:
        get_storage_url(tmp_path, f"nonsense://user:{SECRET}@local\0host")
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:a:b/c@d@host:1/x", "postgresql://me:***@host:1/x"),
        ("'mysql://me:secret@host/x' and a@b", "'mysql://me:***@host/x' and a@b"),
        ("http://host:8080/path, mail me@host", "http://host:8080/path, mail me@host"),
        ("sqlite:///folder/history.db", "sqlite:///folder/history.db"),
        ("x://h/y?sslpassword=abc&mode=1", "x://h/y?sslpassword=***&mode=1"),
    ],
)
def test_only_passwords_are_masked(text, shown):
    assert without_passwords(text) == shown


def test_the_command_hides_the_password(run):
    code, out, err = run("report", "x", "--storage", URLS[0])
    assert code == 2
    assert "nonsense://user:***@localhost/runs" in err
    assert SECRET not in out + err


def test_a_run_hides_the_password(net, digits, accuracy, caplog):
    converter = MixedPrecision(
        model=net,
        precisions="int8",
        metric=accuracy,
        eval_dataloader=digits[1].loader(),
        storage=URLS[0],
    )
    with caplog.at_level(logging.DEBUG), pytest.raises(HistoryError) as caught:
        converter()
    assert SECRET not in str(caught.value) + caplog.text


@pytest.mark.slow
def test_the_pages_of_jobs_hide_the_password(run, tmp_path, digits, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write_jobs_into(tmp_path, digits)("first")
    text = file.read_text()
    file.write_text(text.replace("tuning: {", f"tuning: {{storage: '{URLS[0]}', "))
    code, out, err = run("tune-many", "jobs", "-o", "out")
    assert code == 1
    assert "nonsense://user:***@localhost/runs" in out + err
    written = [path for path in Path("out").rglob("*") if path.is_file()]
    assert any(path.suffix == ".html" for path in written)
    for content in (out, err, *(path.read_bytes().decode("latin-1") for path in written)):
        assert SECRET not in content
