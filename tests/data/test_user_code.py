"""What of the user's can be named, by a call and by a file."""

import subprocess
import sys

import cloudpickle
import pytest

from neural_mp.config import trust_of
from neural_mp.data.user_imports import load_user_object, named_in_file
from neural_mp.errors import ConfigurationError
from neural_mp.util.system.processes import make_python_command, make_worker_environment

OWN = """
from functools import partial
from sklearn.metrics import accuracy_score
from sklearn.datasets import load_digits as digits
import subprocess
from hidden_neighbour_of_own import Neighbour

class Digits:
    class Inner: pass
    @staticmethod
    def make(): return 1

weighted = partial(accuracy_score, normalize=False)
estimator = digits().images
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of the user's in the working directory, with a neighbour."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "own_code_here.py").write_text(OWN)
    (tmp_path / "hidden_neighbour_of_own.py").write_text("class Neighbour: pass\n")
    yield tmp_path
    for name in ("own_code_here", "hidden_neighbour_of_own", "beside_code_here", "colorama_own"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "attribute", ["Digits", "Digits.Inner", "Digits.make", "weighted", "estimator", "Neighbour"]
)
def test_a_file_may_name_whatever_is_made_in_the_users_modules(own, attribute):
    with named_in_file(None, ()):
        assert load_user_object(f"own_code_here:{attribute}") is not None


def test_a_file_may_name_modules_that_lie_beside_it(own, tmp_path):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "beside_code_here.py").write_text("class Data: pass\n")
    with named_in_file(folder, ()):
        assert load_user_object("beside_code_here:Data").__module__ == "beside_code_here"


def test_installed_code_can_be_named_where_its_module_is_trusted(own):
    for name in ("sklearn.metrics:accuracy_score", "own_code_here:accuracy_score"):
        with (
            named_in_file(None, ()),
            pytest.raises(ConfigurationError, match=r"not your own code.*sklearn.*--trust MODULE"),
        ):
            load_user_object(name)
        for trust in ("sklearn", "sklearn.metrics"):
            with named_in_file(None, (trust,)):
                assert load_user_object(name).__name__ == "accuracy_score"
    with named_in_file(None, ("sklearn.metric",)), pytest.raises(ConfigurationError):
        load_user_object("sklearn.metrics:accuracy_score")


def test_a_call_names_whatever_it_likes():
    assert load_user_object("sklearn.metrics:accuracy_score").__name__ == "accuracy_score"


@pytest.mark.parametrize("name", ["subprocess:run", "own_code_here:subprocess.run"])
def test_pythons_own_modules_are_never_named_by_a_file(own, name):
    with pytest.raises(ConfigurationError, match="standard library, got 'subprocess'"):
        trust_of("subprocess")
    with (
        named_in_file(None, ("subprocess",)),
        pytest.raises(ConfigurationError, match="not your own code"),
    ):
        load_user_object(name)


def test_trust_takes_names_of_modules():
    assert trust_of("sklearn") == ("sklearn",)
    with pytest.raises(ConfigurationError, match="got 'sk-learn'"):
        trust_of(["sk-learn"])


def test_the_users_module_is_meant_where_one_of_its_name_is_installed(own):
    assert "pluggy" in sys.modules
    (own / "pluggy.py").write_text("class Data: pass\n")
    with pytest.raises(ConfigurationError, match=r"another module 'pluggy' is in use.*rename"):
        load_user_object("pluggy:Data")


def test_the_working_directory_comes_last(own):
    initial = list(sys.path)
    load_user_object("own_code_here:Digits")
    assert sys.path == [*initial, str(own)]


def _hostile(folder):
    for name in ("random", "queue", "json", "multiprocessing", "loky", "numpy"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")


@pytest.mark.slow
def test_processes_of_ours_find_no_module_in_the_working_directory(tmp_path):
    _hostile(tmp_path)
    command = make_python_command("neural_mp.adaptors.onnxrt.int8_accumulation")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


_WORKERS = """
import sys; sys.path = [p for p in sys.path if p]
import os, loky
from neural_mp.util.system.processes import make_worker_environment, restore_environment
pool = loky.ProcessPoolExecutor(1, initializer=restore_environment, env=make_worker_environment({}))
print(pool.submit(os.environ.get, "PYTHONSAFEPATH").result())
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="only the error is there in Python 3.10")
def test_workers_find_no_module_in_the_working_directory(tmp_path):
    _hostile(tmp_path)
    command = [sys.executable, "-c", _WORKERS]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "None"
    assert not (tmp_path / "ran").exists()


def test_where_workers_would_run_such_a_module_none_is_started(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("neural_mp.util.system.processes._SAFE_PATH_WORKS", False)
    make_worker_environment({})
    (tmp_path / "random.py").touch()
    with pytest.raises(ConfigurationError, match=r"directory of workers.*got 'random.py'; rename"):
        make_worker_environment({})


def test_a_module_of_the_users_comes_before_one_that_is_only_installed(own):
    installed = own / "installed"
    installed.mkdir()
    (installed / "colorama_own.py").write_text("class Data: home = 'installed'\n")
    (own / "colorama_own.py").write_text("class Data: home = 'here'\n")
    sys.path.insert(0, str(installed))
    with named_in_file(None, ()):
        loaded = load_user_object("colorama_own:Data")
    assert loaded.home == "here"
    # Another process, which finds the installed one by this name, gets the class itself.
    sent = cloudpickle.dumps(loaded)
    del sys.modules["colorama_own"]
    assert cloudpickle.loads(sent).home == "here"
