import sys

import numpy as np
import pytest
import yaml
from sklearn.datasets import load_digits

from neural_mp.common import DataLoader
from neural_mp.data import Registry, build_dataloader, build_dataset, build_transforms
from neural_mp.errors import ConfigurationError, DataError

USER_CODE = """
from sklearn.datasets import load_digits

class Digits:
    def __init__(self, count, first=0):
        digits = load_digits()
        self.samples = list(zip(digits.images, digits.target))[first:first + count]
    def __len__(self):
        return len(self.samples)
    def __getitem__(self, index):
        return self.samples[index]

def stream(**options):
    return ((image, label) for image, label in Digits(**options).samples)

class Walked:
    def __iter__(self):
        return iter(Digits(count=7).samples)

class AddOne:
    def __call__(self, sample):
        return sample[0] + 1, sample[1]

def broken(count):
    return len(count)

def nothing():
    return None

number = 5
"""


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """A module in the current directory, which is not on the path."""
    (tmp_path / "my_digits.py").write_text(USER_CODE)
    (tmp_path / "my_broken.py").write_text("import does_not_exist_at_all\n")
    (tmp_path / "my_syntax.py").write_text("def (:\n")
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "__init__.py").write_text("")
    (tmp_path / "my_package" / "data.py").write_text(USER_CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    modules = set(sys.modules)
    yield "my_digits"
    for name in set(sys.modules) - modules:
        if name.startswith("my_"):
            del sys.modules[name]


def test_a_loader_written_in_yaml_gives_the_batches_it_describes(tmp_path):
    digits = load_digits()
    path = tmp_path / "digits.npz"
    np.savez(path, inputs=digits.images.astype(np.uint8), labels=digits.target)
    spec = yaml.safe_load(f"""
        batch_size: 32
        last_batch: rollover
        shuffle: false
        dataset: {{numpy: {{path: "{path}"}}}}
        transform:
          ExpandDims: {{axis: 0}}
          Rescale: {{scale: 0.0625}}
    """)
    loader = build_dataloader(spec)
    assert isinstance(loader, DataLoader)
    batches = list(loader)
    assert len(batches) == len(loader) == 57
    inputs = np.concatenate([inputs for inputs, _ in batches])
    np.testing.assert_array_equal(inputs, digits.images[:, np.newaxis].astype(np.float32) / 16)
    np.testing.assert_array_equal(np.concatenate([y for _, y in batches]), digits.target)


def test_discard_and_shuffle_reach_the_loader():
    dataset = {"dummy": {"shape": [1], "size": 10, "label": 1000}}
    plain = build_dataloader({"dataset": dataset, "batch_size": 4, "last_batch": "discard"})
    assert [len(labels) for _, labels in plain] == [4, 4]
    spec = {"dataset": dataset, "batch_size": 10, "shuffle": True, "seed": 3}
    ((_, labels),) = build_dataloader(spec)
    ((_, again),) = build_dataloader(spec)
    ((_, ordered),) = build_dataloader({"dataset": dataset, "batch_size": 10})
    assert labels.tolist() == again.tolist() != ordered.tolist()
    assert sorted(labels) == sorted(ordered)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (None, "dataloader must hold at least a dataset"),
        ({}, "dataloader needs a dataset"),
        ({"batchsize": 3}, "dataloader has no 'batchsize'; did you mean 'batch_size'"),
        ({"dataset": {}}, "exactly one name .* got none"),
        ({"dataset": {"a": 1, "b": 2}}, "exactly one name .* got a, b"),
        ({"dataset": "dummy"}, "exactly one name .* got 'dummy'"),
        ({"dataset": {"dumy": {}}}, "unknown dataset 'dumy'; did you mean 'dummy'"),
        ({"dataset": {3: {}}}, "unknown dataset 3"),
        ({"dataset": {"dummy": {"shape": [1]}}}, "dataset 'dummy' needs the option 'size'"),
        ({"dataset": {"dummy": {"shpae": [1]}}}, "no option 'shpae'; did you mean 'shape'"),
        ({"dataset": {"dummy": {1: 2}}}, "no option 1"),
        ({"dataset": {}, "shuffle": "false"}, "shuffle must be true or false, got 'false'"),
        ({"dataset": {}, "seed": None}, "seed must be a whole number from 0"),
    ],
)
def test_a_wrong_loader_is_refused_by_name(spec, message):
    with pytest.raises(ConfigurationError, match=message):
        build_dataloader(spec)


def test_a_wrong_batch_size_is_refused():
    with pytest.raises(DataError, match="batch_size must be a whole number from 1"):
        build_dataloader({"dataset": {"dummy": {"shape": [1], "size": 1}}, "batch_size": 0})


def test_a_dataset_of_the_users_own_is_found_in_the_current_directory(user_module):
    for module in ("my_digits", "my_package.data"):
        dataset = build_dataset({f"{module}:Digits": {"count": 5, "first": 2}})
        assert len(dataset) == 5
        assert dataset[0][1] == load_digits().target[2]


def test_a_dataset_that_can_only_be_walked_is_loaded_and_transformed(user_module):
    loader = build_dataloader(
        {
            "batch_size": 4,
            "dataset": {"my_digits:Walked": None},
            "transform": {"my_digits:AddOne": {}, "Cast": {"dtype": "float32"}},
        }
    )
    for _ in range(2):
        inputs = np.concatenate([inputs for inputs, _ in loader])
        np.testing.assert_array_equal(inputs, load_digits().images[:7].astype(np.float32) + 1)


def test_a_factory_may_take_any_options(user_module):
    assert len(list(build_dataset({"my_digits:stream": {"count": 3}}))) == 3


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("my_digts:Digits", {}, "no module 'my_digts'.*did you mean 'my_digits'"),
        ("my_package.dta:Digits", {}, "no module 'my_package.dta'.*did you mean 'my_package.data'"),
        ("my_digits:Digit", {}, r"my_digits\.py has no 'Digit'; did you mean 'Digits'"),
        ("my_digits:Digits", {"cuont": 3}, "has no option 'cuont'; did you mean 'count'"),
        ("my_digits:Digits", {}, "needs the option 'count'"),
        ("my_digits:number", {}, "must be a class, or a function .*, got an int"),
        ("my_broken:X", {}, "importing 'my_broken'.*No module named 'does_not_exist_at_all'"),
        ("my_syntax:X", {}, "importing 'my_syntax'.*failed with SyntaxError"),
        ("my-digits:X", {}, "must be module:attribute"),
        ("my_digits:", {}, "must be module:attribute"),
    ],
)
def test_code_that_cannot_be_used_is_named(user_module, name, options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_dataset({name: options})


def test_an_error_inside_the_users_code_is_left_as_it_is(user_module):
    with pytest.raises(TypeError, match="has no len"):
        build_dataset({"my_digits:broken": {"count": 3}})


def test_what_is_no_dataset_or_transform_is_refused(user_module):
    with pytest.raises(DataError, match="must have __getitem__ and __len__, or be iterable"):
        build_dataset({"my_digits:nothing": {}})
    with pytest.raises(DataError, match="'my_digits:Digits' has no samples"):
        build_dataset({"my_digits:Digits": {"count": 0}})
    with pytest.raises(ConfigurationError, match="must return a callable .*, got a NoneType"):
        build_transforms({"my_digits:nothing": {}})


def test_a_registry_refuses_a_name_twice_and_finds_it_however_written():
    registry = Registry("thing")

    @registry.register("MyThing", "other")
    def make(size=1):
        return size

    assert "my_thing" in registry
    assert registry.build("MY-THING", {"size": 4}) == registry.build("other", {"size": 4}) == 4
    assert (list(registry), len(registry)) == (["MyThing"], 1)
    with pytest.raises(ConfigurationError, match="thing 'Other' is registered already"):
        registry.register("new", "Other")(make)
    assert "new" not in registry
