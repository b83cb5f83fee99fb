"""A deprecated name warns for two minor versions, and is gone after them."""

import importlib
import pkgutil

import pytest

import neural_mp
from neural_mp.util import deprecation
from neural_mp.util.deprecation import Deprecation, deprecated


def test_a_deprecated_function_works_and_warns_at_the_line_of_the_caller(monkeypatch):
    monkeypatch.setattr(deprecation, "DEPRECATIONS", [])

    @deprecated("0.2", "0.4", "use new_sum")
    def old_sum(first: int, second: int) -> int:
        return first + second

    with pytest.warns(
        DeprecationWarning, match=r"old_sum is deprecated.*0\.4; use new_sum"
    ) as seen:
        assert old_sum(1, second=2) == 3
    assert seen[0].filename == __file__
    assert [entry.removed_in for entry in deprecation.DEPRECATIONS] == ["0.4"]


@pytest.mark.parametrize(("since", "removed_in"), [("0.2", "0.3"), ("1.9", "1.9")])
def test_a_removal_without_notice_is_refused(since, removed_in):
    with pytest.raises(ValueError, match="2 minor versions after"):
        Deprecation("name", since, removed_in, "use another")


def test_a_name_is_due_from_the_version_of_its_removal_on():
    entry = Deprecation("name", "0.9", "1.0", "use another")
    assert [entry.is_due(version) for version in ("0.9.7", "0.10.dev3+g1", "1.0.0", "1.2")] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.slow
def test_no_removal_is_overdue():
    for module in pkgutil.walk_packages(neural_mp.__path__, "neural_mp."):
        if not module.name.endswith("_main"):
            importlib.import_module(module.name)
    if neural_mp.__version__[:1].isdigit():
        due = [
            str(entry) for entry in deprecation.DEPRECATIONS if entry.is_due(neural_mp.__version__)
        ]
        assert not due
