import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

from neural_mp.data import DATASETS, build_dataset, datasets
from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError


@pytest.fixture
def digits_npz(tmp_path):
    digits = load_digits()
    path = tmp_path / "digits.npz"
    np.savez(path, inputs=digits.images.astype(np.float32), labels=digits.target)
    return path


@pytest.fixture
def image_root(tmp_path):
    image = pytest.importorskip("PIL.Image")
    digits = load_digits()
    root = tmp_path / "images"
    for i in range(40):
        folder = root / f"digit_{digits.target[i]}"
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (digits.images[i] * 15).astype(np.uint8)
        image.fromarray(np.stack([pixels, pixels, 255 - pixels], axis=-1)).save(folder / f"{i}.png")
    return root


def write(path, text):
    path.write_text(text, encoding="utf-8")
    return str(path)


# numpy


def test_npz_gives_the_arrays_that_were_saved(digits_npz):
    dataset = build_dataset({"numpy": {"path": str(digits_npz)}})
    digits = load_digits()
    assert len(dataset) == 1797
    inputs, label = dataset[17]
    np.testing.assert_array_equal(inputs, digits.images[17].astype(np.float32))
    assert inputs.dtype == np.float32
    assert label == digits.target[17]


def test_separate_files_and_keys_give_the_same_as_one_file(digits_npz, tmp_path):
    digits = load_digits()
    np.save(tmp_path / "x.npy", digits.images.astype(np.float32))
    np.savez(tmp_path / "y.npz", only=digits.target)
    single = build_dataset({"NPZ": {"path": str(digits_npz)}})
    for spec in (
        {"inputs": str(tmp_path / "x.npy"), "labels": str(tmp_path / "y.npz")},
        {"inputs": f"{digits_npz}:inputs", "labels": f"{tmp_path / 'y.npz'}:only"},
    ):
        split = build_dataset({"numpy": spec})
        for i in (0, 1796):
            np.testing.assert_array_equal(single[i][0], split[i][0])
            assert single[i][1] == split[i][1]


def test_start_and_stop_take_a_slice(digits_npz):
    dataset = build_dataset({"numpy": {"path": str(digits_npz), "start": 100, "stop": 110}})
    assert [int(dataset[i][1]) for i in range(10)] == load_digits().target[100:110].tolist()
    assert len(dataset) == 10


def test_inputs_without_labels_have_the_label_none(digits_npz):
    dataset = build_dataset({"numpy": {"path": str(digits_npz), "labels_key": None}})
    assert dataset[0][1] is None


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"no/such\.npz does not exist"):
        build_dataset({"numpy": {"path": "no/such.npz"}})


def test_a_missing_array_names_the_nearest(digits_npz):
    with pytest.raises(DataError, match="no array 'label'; did you mean 'labels'"):
        build_dataset({"numpy": {"path": str(digits_npz), "labels_key": "label"}})


def test_a_file_of_several_arrays_needs_a_key(digits_npz):
    with pytest.raises(DataError, match=r"holds 2 arrays \(inputs, labels\); name one"):
        build_dataset({"numpy": {"inputs": str(digits_npz)}})


def test_inputs_and_labels_of_different_length_are_refused(tmp_path):
    np.savez(tmp_path / "bad.npz", inputs=np.zeros((5, 2)), labels=np.zeros(4))
    with pytest.raises(DataError, match=r"5 inputs \(shape \(5, 2\)\) but 4 labels"):
        build_dataset({"numpy": {"path": str(tmp_path / "bad.npz"), "stop": 4}})


def test_no_samples_are_refused(digits_npz, tmp_path):
    np.savez(tmp_path / "empty.npz", inputs=np.zeros((0, 2)), labels=np.zeros(0))
    with pytest.raises(DataError, match="has no samples"):
        build_dataset({"numpy": {"path": str(tmp_path / "empty.npz")}})
    with pytest.raises(DataError, match="start=5000 to stop=None, of 1797 samples, has no samples"):
        build_dataset({"numpy": {"path": str(digits_npz), "start": 5000}})


def test_one_number_is_not_an_array_of_samples(tmp_path):
    np.save(tmp_path / "x.npy", np.float32(3))
    with pytest.raises(DataError, match="must be an array, got one number"):
        build_dataset({"npy": {"inputs": str(tmp_path / "x.npy")}})


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("<f4", f"({'9' * 4000}, 0)"),
        ("<U0", f"({10**12},)"),
        ("|V0", f"({10**18},)"),
        ("<f4", f"({10**12}, 0)"),
    ],
    ids=["digits", "no letters", "no bytes", "no values"],
)
def test_arrays_of_more_values_than_a_file_can_hold_are_refused(tmp_path, kind, shape):
    path = tmp_path / "a.npy"
    header = f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
    with pytest.raises(DataError, match="cannot be read as plain"):
        build_dataset({"numpy": {"inputs": str(path)}})


@pytest.mark.parametrize("name", ["pickled.npy", "pickled.npz"])
def test_pickled_objects_are_never_loaded(tmp_path, name):
    objects = np.array([{"a": 1}, None], dtype=object)
    if name.endswith("npy"):
        np.save(tmp_path / name, objects, allow_pickle=True)
    else:
        np.savez(tmp_path / name, inputs=objects)
    with pytest.raises(DataError, match="pickled objects are refused"):
        build_dataset({"numpy": {"inputs": str(tmp_path / name)}})


@pytest.mark.parametrize("name", ["broken.npy", "broken.npz"])
def test_a_broken_file_is_named(tmp_path, name):
    (tmp_path / name).write_bytes(b"PK\x03\x04 not really")
    with pytest.raises(DataError, match=f"{name} cannot be read"):
        build_dataset({"numpy": {"inputs": str(tmp_path / name)}})


@pytest.mark.parametrize(
    "options", [{}, {"path": "a.npz", "inputs": "b.npy"}, {"path": "a.npz", "labels": "b.npy"}]
)
def test_path_and_inputs_are_one_or_the_other(options):
    with pytest.raises(ConfigurationError, match="needs either path"):
        build_dataset({"numpy": options})


def test_start_must_be_a_whole_number(digits_npz):
    message = r"numpy: start must be a whole number from -4294967295 to 4294967295, got 1\.5"
    with pytest.raises(ConfigurationError, match=message):
        build_dataset({"numpy": {"path": str(digits_npz), "start": 1.5}})


# ImageFolder


def test_images_come_as_uint8_hwc_with_labels_of_sorted_folders(image_root):
    dataset = build_dataset({"image_folder": {"root": str(image_root)}})
    digits = load_digits()
    assert len(dataset) == 40
    assert dataset.classes == tuple(f"digit_{i}" for i in range(10))
    for (path, label), (inputs, target) in zip(dataset.files, dataset, strict=True):
        number = int(path.stem)
        assert target == label == digits.target[number]
        assert inputs.shape == (8, 8, 3)
        assert inputs.dtype == np.uint8
        np.testing.assert_array_equal(inputs[:, :, 0], (digits.images[number] * 15).astype("uint8"))


def test_grey_images_have_one_channel(image_root):
    inputs, _ = build_dataset({"ImageFolder": {"root": str(image_root), "mode": "L"}})[0]
    assert inputs.shape == (8, 8, 1)


def test_a_folder_without_images_is_refused(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "cat").mkdir()
    with pytest.raises(DataError, match="found no images in the folders under"):
        build_dataset({"ImageFolder": {"root": str(tmp_path)}})
    with pytest.raises(DataError, match="does not exist"):
        build_dataset({"ImageFolder": {"root": str(tmp_path / "dogs")}})
    file = write(tmp_path / "file", "x")
    with pytest.raises(DataError, match="must be a folder"):
        build_dataset({"ImageFolder": {"root": file}})


def test_a_broken_image_is_named(image_root):
    (image_root / "digit_0" / "0.png").write_bytes(b"no image")
    dataset = build_dataset({"ImageFolder": {"root": str(image_root)}})
    with pytest.raises(DataError, match=r"0\.png cannot be read as an image"):
        dataset[0]


def test_an_unknown_image_mode_is_refused(image_root):
    with pytest.raises(ConfigurationError, match="mode must be 'RGB' or 'L', got 'BGR'"):
        build_dataset({"ImageFolder": {"root": str(image_root), "mode": "BGR"}})


def test_without_pillow_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingFrameworkError, match=r"pip install .*\[images\]"):
        build_dataset({"ImageFolder": {"root": str(tmp_path)}})


# csv


def test_csv_gives_float32_vectors_and_labels(tmp_path):
    digits = load_digits()
    table = np.column_stack([digits.data, digits.target])
    header = ",".join([f"pixel_{i}" for i in range(64)] + ["digit"])
    path = tmp_path / "digits.csv"
    np.savetxt(path, table, delimiter=",", fmt="%d", header=header, comments="")
    dataset = build_dataset({"csv": {"path": str(path), "label": "digit"}})
    np.testing.assert_array_equal(dataset.inputs, digits.data.astype(np.float32))
    np.testing.assert_array_equal(dataset.labels, digits.target)
    assert dataset.inputs.dtype == np.float32
    assert dataset.labels.dtype == np.int64


def test_text_labels_become_indices_of_sorted_classes(tmp_path):
    path = write(tmp_path / "t.csv", "kind;size;weight\ndog;1;2\ncat;3;4.5\n\ndog;5;6\n")
    dataset = build_dataset({"csv": {"path": path, "label": 0, "delimiter": ";"}})
    assert dataset.classes == ("cat", "dog")
    assert dataset.labels.tolist() == [1, 0, 1]
    assert dataset.inputs.tolist() == [[1, 2], [3, 4.5], [5, 6]]


def test_columns_can_be_chosen_and_labels_be_fractions_or_absent(tmp_path):
    path = write(tmp_path / "t.csv", "a,1,0.5\nb,2,1.5\n")
    options = {"path": path, "header": False, "columns": [1]}
    dataset = build_dataset({"csv": options})
    assert dataset.inputs.tolist() == [[1], [2]]
    assert dataset.labels.dtype == np.float32
    assert dataset.labels.tolist() == [0.5, 1.5]
    assert build_dataset({"csv": {**options, "label": None}})[0][1] is None


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b\n1,x\n", {"label": "a"}, "line 2, column 'b': 'x' is not a finite number"),
        ("a,b\n1,nan\n", {"label": "a"}, "'nan' is not a finite number"),
        ("a,b\n1e39,1\n", {}, "line 2, column 'a': '1e39' is not a finite number"),
        ("a,b\n" + "x" * 90_000 + ",1\n", {}, "column 'a': 'x{78}… is not a finite number"),
        ("size,b\n1,2\n", {"label": "sise"}, "no column 'sise'; did you mean 'size'"),
        ("a,b\n1,2\n", {"label": 2}, "no column 2; it has 2"),
        ("1,2\n", {"label": "a", "header": False}, "without a header, give its index"),
        ("a,b\n1,2\n1\n", {}, "line 3: 1 cell where 2 are expected"),
        ("a,b\n", {}, "has no rows of data"),
        ("", {}, "has no rows of data"),
        ("a\n1\n", {}, "no column left for the inputs"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(tmp_path, text, options, message):
    path = write(tmp_path / "t.csv", text)
    with pytest.raises(DataError, match=message):
        build_dataset({"csv": {"path": path, **options}})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"delimiter": "::"}, "delimiter must be one character"),
        ({"header": "yes"}, "header must be true or false"),
        ({"columns": []}, "columns must be a list"),
        ({"label": 1.5}, "a column is a name or an index"),
    ],
)
def test_wrong_csv_options_are_refused(tmp_path, options, message):
    path = write(tmp_path / "t.csv", "a,b\n1,2\n")
    with pytest.raises(ConfigurationError, match=message):
        build_dataset({"csv": {"path": path, **options}})


@pytest.mark.slow
def test_a_table_of_very_many_classes_is_read(tmp_path):
    rows = "".join(f"1,class {number:06}\n" for number in range(200_000))
    dataset = build_dataset({"csv": {"path": write(tmp_path / "t.csv", "a,b\n" + rows)}})
    assert [label for _, label in dataset] == list(range(200_000))


class Compared(str):
    """A class name that counts its comparisons."""

    __hash__ = str.__hash__
    count = 0

    def __eq__(self, other):
        Compared.count += 1
        return str.__eq__(self, other)

    def __lt__(self, other):
        Compared.count += 1
        return str.__lt__(self, other)


def test_class_names_are_not_compared_each_with_each():
    names = [Compared(f"class {number}") for number in range(5000)]
    labels, classes = datasets._encode_labels(names[::-1])
    assert [classes[label] for label in labels] == names[::-1]
    assert Compared.count < 30 * len(names)


def test_a_table_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "t.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="cannot be read as a table in UTF-8"):
        build_dataset({"csv": {"path": str(tmp_path / "t.csv")}})


# dummy


def test_dummy_samples_depend_on_seed_and_index_alone():
    spec = {"shape": [3, 4], "size": 6, "low": -2, "high": 5, "label": 10}
    forward = [build_dataset({"dummy": spec})[i] for i in range(6)]
    dataset = build_dataset({"dummy": spec})
    for i in reversed(range(6)):
        np.testing.assert_array_equal(dataset[i][0], forward[i][0])
        assert dataset[i][1] == forward[i][1]
    assert not np.array_equal(forward[0][0], forward[1][0])
    reseeded = build_dataset({"dummy": {**spec, "seed": 1}})
    assert not np.array_equal(reseeded[0][0], forward[0][0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8"])
def test_dummy_values_stay_in_range(dtype):
    spec = {"shape": [100], "size": 20, "low": 3, "high": 6, "dtype": dtype, "label": [2, 4]}
    samples = list(build_dataset({"dummy": spec}))
    values = np.stack([inputs for inputs, _ in samples])
    assert values.shape == (20, 100)
    assert values.dtype == dtype
    assert values.min() >= 3
    assert values.max() <= 6
    assert {int(label) for _, label in samples} == {2, 3}
    if values.dtype.kind != "f":
        assert set(np.unique(values)) == {3, 4, 5}


def test_dummy_labels_are_zero_or_absent():
    assert build_dataset({"dummy": {"shape": [1], "size": 1}})[0][1] == 0
    assert build_dataset({"dummy": {"shape": [1], "size": 1, "label": False}})[0][1] is None


def test_dummy_ends():
    with pytest.raises(IndexError):
        build_dataset({"dummy": {"shape": [1], "size": 2}})[2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": 3}, "shape must be a list of whole numbers"),
        ({"shape": [0]}, "each of dummy: shape must be a whole number from 1"),
        ({"size": 0}, "size must be a whole number from 1"),
        ({"size": True}, "size must be a whole number"),
        ({"low": "a"}, "low must be a finite number"),
        ({"low": 2}, r"low \(2.0\) must be below high \(1.0\)"),
        ({"dtype": "flaot32"}, "dtype must be the name of a numpy dtype"),
        ({"dtype": "uint8", "low": -1}, "uint8 does not hold"),
        ({"dtype": "int8", "low": 0.5, "high": 2}, "low and high must be whole numbers"),
        ({"label": [3, 3]}, "low below high"),
        ({"label": "yes"}, "label must be a whole number from 1"),
        ({"seed": -1}, "seed must be a whole number from 0"),
    ],
)
def test_wrong_dummy_options_are_refused(options, message):
    with pytest.raises(ConfigurationError, match=message):
        build_dataset({"dummy": {"shape": [2], "size": 3, **options}})


def test_every_dataset_is_listed():
    assert sorted(DATASETS) == [
        "ImageFolder",
        "ImageMaskFolder",
        "coco",
        "csv",
        "dummy",
        "multiple_choice",
        "numpy",
        "text",
        "yolo",
    ]
