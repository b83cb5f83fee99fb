"""URLs of storages with passwords, which no message, log, report, history or file may contain."""

from __future__ import annotations

import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
from attacks.hostile import Attacks, command_here
from attacks.user_objects import Given
from attacks.users_ways import tiny_onnx

from neural_mp import MixedPrecision
from neural_mp.config import load_settings
from neural_mp.errors import NeuralMPError
from neural_mp.jobs.driver import tune_many
from neural_mp.runs.history import History, get_storage_url, read_record
from neural_mp.testing import digits

PASSWORDS = Attacks("passwords of storages")
SECRET = "s3cretW0rd"
#: Form of a URL → the URL.
_URLS = {
    "a scheme of nobody": f"nonsense://user:{SECRET}@localhost/runs",
    "a driver of nobody": f"postgresql+nothing://user:{SECRET}@localhost:1/runs",
    "an at and slashes": f"nonsense://user:a/{SECRET}@b/{SECRET}@localhost/runs",
    "no user": f"nonsense://:{SECRET}@localhost",
    "a parameter": f"nonsense://localhost/runs?password={SECRET}&user=me",
    "a parameter of another name": f"nonsense://localhost/runs?x=1&sslPassword={SECRET}",
    "SQLite with a host": f"sqlite://user:{SECRET}@localhost:1/runs",
    "percents": f"nonsense://user:%40{SECRET}%2F@localhost/runs",
    "a bad port": f"nonsense://user:{SECRET}@localhost:port/runs",
    "a line break": f"nonsense://user:{SECRET}@local\nhost/runs",
    "brackets": f"nonsense://user:[{SECRET}]@[::1]/runs",
    "a folder that is missing": f"sqlite:////no/such/folder/h.db?password={SECRET}",
}
_TUNING = """
model: {{name: net.onnx}}
mixed_precision: {{precisions: int8}}
evaluation:
  accuracy:
    metric: {{topk: 1}}
    dataloader: {{batch_size: 50, dataset: {{numpy: {{path: data.npz}}}}}}
tuning: {{objective: modelsize, accuracy_criterion: {{relative: 0.4}}, {entry},
  exit_policy: {{max_trials: 1}}}}
"""


@contextmanager
def _logged() -> Iterator[io.StringIO]:
    """Collect what is logged at any level, with tracebacks."""
    text = io.StringIO()
    handler, logger = logging.StreamHandler(text), logging.getLogger("neural_mp")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield text
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates


def _quoted(url: str) -> str:
    return '"' + url.replace("\n", "\\n") + '"'


def _write_job(folder: Path, entry: str) -> Path:
    (folder / "net.onnx").write_bytes(tiny_onnx().SerializeToString())
    images, labels = digits()[1].images[:100], digits()[1].labels[:100]
    np.savez(folder / "data.npz", inputs=images, labels=labels)
    file = folder / "jobs" / "job.yaml"
    file.parent.mkdir()
    file.write_text(_TUNING.format(entry=entry))
    return file


def _read_record(folder: Path, url: str) -> None:
    read_record(url)


def _begin_a_history(folder: Path, url: str) -> None:
    History(get_storage_url(folder, url), {"model": "a" * 12}, higher_is_better=True, resume=False)


def _run(folder: Path, url: str) -> None:
    converter = MixedPrecision(workspace=folder / "workspace", precisions="int8")
    Given(converter).set_up_rightly()
    converter.storage = url
    converter()


def _report(folder: Path, url: str) -> None:
    command_here("report", "x", "--storage", url, "--output", str(folder / "page.html"))


def _tune_with(key: str) -> Callable[[Path, str], None]:
    def use(folder: Path, url: str) -> None:
        file = _write_job(folder, f"{key}: {_quoted(url)}")
        command_here("tune", str(file), "--output", "out")

    return use


def _tune_jobs(folder: Path, url: str) -> None:
    _write_job(folder, f"storage: {_quoted(url)}")
    results = tune_many("jobs", output="out")
    (outcome,) = results.outcomes
    raise NeuralMPError(repr(results) + repr(outcome))


def _name_another_key(key: str) -> Callable[[Path, str], None]:
    def use(folder: Path, url: str) -> None:
        load_settings(_write_job(folder, f"{key}: {_quoted(url)}"))

    return use


_USES: dict[str, Callable[[Path, str], None]] = {
    "reading a record": _read_record,
    "beginning a history": _begin_a_history,
    "a run": _run,
    "report": _report,
    "tune": _tune_with("storage"),
    "tune-many": _tune_jobs,
    "a strategy": _tune_with("strategy"),
    "a key that is misspelled": _name_another_key("storrage"),
    "an objective": _name_another_key("timeout"),
}


def _hidden(folder: Path, use: Callable[[], None], kept: tuple[str, ...] = ()) -> None:
    """See that what a use prints, logs, raises and writes hides the password.

    Args:
        folder: the working directory.
        use: what is done.
        kept: names of the user's own files, which have the password.
    """
    cwd, error, printed = Path.cwd(), None, io.StringIO()
    os.chdir(folder)
    with _logged() as log, redirect_stdout(printed), redirect_stderr(printed):
        try:
            use()
        except NeuralMPError as raised:
            error = raised
        finally:
            os.chdir(cwd)
    texts = {"the log": log.getvalue(), "what is printed": printed.getvalue()}
    if error is not None:
        texts |= {"str": str(error), "repr": repr(error)}
        texts["the traceback"] = traceback.format_exception_only(error)[-1]
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in kept:
            texts[path.name] = path.read_bytes().decode("latin-1")
    leaks = [name for name, text in texts.items() if SECRET in text]
    assert not leaks, f"in {', '.join(leaks)}: {texts[leaks[0]][-1500:]}"
    if error is not None:
        raise error


for _title, _used in _USES.items():

    def _fails(folder: Path, canary: Path, form: str, used=_used) -> None:  # type: ignore[no-untyped-def]
        _hidden(folder, lambda: used(folder, _URLS[form]), ("job.yaml",))

    PASSWORDS.here(f"{_title}, by a URL with", *_URLS)(_fails)


def _succeed(folder: Path) -> None:
    """Tune, save and report with a storage that exists, whose URL has a password for SQLite."""
    url = f"sqlite:///file:{folder}/own.db?password={SECRET}&uri=true"
    converter = MixedPrecision(workspace=folder / "workspace", precisions="int8")
    Given(converter).set_up_rightly()
    converter.storage = url
    result = converter()
    print(result, result.report, result.record, file=sys.stdout)
    result.save(folder / "saved")
    command_here("report", str(folder / "saved"), "--output", str(folder / "page.html"))
    record = result.record.name
    command_here("report", record, "--storage", url, "--output", str(folder / "page2.html"))


@PASSWORDS.here("a run in a storage that can be opened", refused=None)
def _is_opened(folder: Path, canary: Path) -> None:
    _hidden(folder, lambda: _succeed(folder))


FAMILY = PASSWORDS.as_family()
