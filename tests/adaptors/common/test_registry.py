"""The registry of adaptors: what it does around an import."""

import gc
import importlib
import sys
from types import ModuleType

import pytest

from neural_mp.adaptors.registry import get_adaptor_named


@pytest.fixture
def collects(monkeypatch):
    """Whether garbage was collected as each adaptor was imported."""
    enabled, original = [], importlib.import_module

    def imported(name):
        enabled.append(gc.isenabled())
        return original(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    return enabled


def test_a_framework_is_imported_without_collections_of_garbage(collects):
    get_adaptor_named("onnxrt")
    assert not collects[0]
    assert gc.isenabled()


def test_who_collects_no_garbage_collects_none_afterwards(collects):
    gc.disable()
    try:
        get_adaptor_named("onnxrt")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_import_that_fails_leaves_the_collection_on(monkeypatch):
    def fails(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="onnxrt"):
        get_adaptor_named("onnxrt")
    assert gc.isenabled()


@pytest.fixture
def imports_one(monkeypatch):
    """Let the import of an adaptor import a module that makes many objects."""
    original = importlib.import_module

    def imported(name):
        monkeypatch.setitem(sys.modules, "a_module_of_the_framework", ModuleType("made"))
        objects.extend([] for _ in range(20_000))
        return original(name)

    objects: list[list[int]] = []
    monkeypatch.setattr(importlib, "import_module", imported)
    return objects


@pytest.fixture
def nothing_frozen():
    """No frozen objects, as in the process of a user; frozen again afterwards."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_imported_counts_as_old(imports_one):
    gc.collect(0)
    get_adaptor_named("onnxrt")
    young = gc.get_objects(generation=0)
    assert len(young) < 10_000 < len(imports_one)
    assert not gc.get_freeze_count()


@pytest.mark.usefixtures("imports_one", "nothing_frozen")
def test_what_the_program_froze_stays_frozen():
    gc.freeze()
    count = gc.get_freeze_count()
    get_adaptor_named("onnxrt")
    assert gc.get_freeze_count() >= count - 100  # some of it was deleted
