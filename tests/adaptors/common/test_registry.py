"""The registry of adaptors: what it does around an import."""

import gc
import importlib

import pytest

from neural_mp.adaptors.registry import adaptor_named


@pytest.fixture
def collects(monkeypatch):
    """Whether garbage was collected as each adaptor was imported."""
    found, original = [], importlib.import_module

    def imported(name):
        found.append(gc.isenabled())
        return original(name)

    monkeypatch.setattr(importlib, "import_module", imported)
    return found


def test_a_framework_is_imported_without_collections_of_garbage(collects):
    adaptor_named("onnxrt")
    assert not collects[0]
    assert gc.isenabled()


def test_who_collects_no_garbage_collects_none_afterwards(collects):
    gc.disable()
    try:
        adaptor_named("onnxrt")
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_import_that_fails_leaves_the_collection_on(monkeypatch):
    def fails(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", fails)
    with pytest.raises(ImportError, match="onnxrt"):
        adaptor_named("onnxrt")
    assert gc.isenabled()
