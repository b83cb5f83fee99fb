"""A framework of somebody else's, named in a YAML file."""

import pytest

from neural_mp.config import parse_settings
from neural_mp.errors import ConfigurationError
from neural_mp.util.plug_ins import read_entry_points

ENTRY = "[neural_mp.adaptors]\nMine = mine:MineAdaptor\n"


@pytest.fixture
def _plugged_in(tmp_path, monkeypatch):
    package = tmp_path / "mine-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("_plugged_in")
def test_a_framework_that_is_plugged_in_is_known_by_its_name():
    assert parse_settings("model: {name: net, framework: Mine}").options.framework == "Mine"


@pytest.mark.usefixtures("_plugged_in")
def test_its_name_is_among_those_that_are_suggested():
    with pytest.raises(ConfigurationError, match="did you mean 'Mine'"):
        parse_settings("model: {name: net, framework: Minne}")


def test_without_it_the_name_is_refused():
    with pytest.raises(ConfigurationError, match="a framework with an adaptor, found 'Mine'"):
        parse_settings("model: {name: net, framework: Mine}")


@pytest.mark.usefixtures("_plugged_in")
def test_a_package_installed_later_is_found(tmp_path):
    assert "Other" not in {entry.name for entry in read_entry_points("neural_mp.adaptors")}
    package = tmp_path / "other-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(ENTRY.replace("Mine =", "Other ="))
    assert {"Mine", "Other"} <= {entry.name for entry in read_entry_points("neural_mp.adaptors")}
