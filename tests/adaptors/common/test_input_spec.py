"""What a user gives beside a model: names, examples, options that a framework does not use."""

import numpy as np
import pytest

from neural_mp.adaptors.common.named_graphs import read_details, write_details
from neural_mp.adaptors.common.naming import unique_name
from neural_mp.adaptors.common.signatures.input_spec import (
    InputSpec,
    in_parts,
    unused_capture_warning,
)
from neural_mp.adaptors.common.signatures.signature import Signature, TensorSpec
from neural_mp.core.enums import Capture
from neural_mp.errors import ConfigurationError, DataError, ModelLoadError, NeuralMPError
from neural_mp.util.validators import mapping_of, record, string

FLOAT = np.dtype(np.float32)


def port(name, *shape):
    return TensorSpec(name, name, FLOAT, shape)


PAIR = Signature((port("a", None, 3), port("b", None, None)), (port("y", None, 2),))
A, B = np.zeros((5, 3), np.float32), np.arange(10, dtype=np.float32).reshape(5, 2)


@pytest.mark.parametrize(
    ("inputs", "names"), [("a, b", ("a", "b")), (["a", "b"], ("a", "b")), (None, ()), ([], ())]
)
def test_names_are_read_from_a_text_or_a_list(inputs, names):
    spec = InputSpec.from_arguments(inputs, "y", None)
    assert (spec.names, spec.outputs, spec.example) == (names, ("y",), None)


def test_inputs_that_are_arrays_are_the_example_before_that_of_the_data():
    assert InputSpec.from_arguments((A, B), None, "of the data").example == (A, B)
    assert InputSpec.from_arguments("a", None, "of the data").example == "of the data"


@pytest.mark.parametrize(("inputs", "outputs"), [(3, None), (["a", A], None), (None, 3)])
def test_anything_else_is_refused(inputs, outputs):
    with pytest.raises(ConfigurationError, match="must be (a name|names)"):
        InputSpec.from_arguments(inputs, outputs, None)


def test_an_example_is_bound_and_nothing_is_said():
    feeds, warnings = InputSpec(example=(A, B)).make_feeds(PAIR)
    assert feeds["b"] is B
    assert warnings == []
    with pytest.raises(DataError):
        InputSpec(example=(A,)).make_feeds(PAIR)


def test_made_up_inputs_come_with_the_first_size_that_is_not_known():
    feeds, warnings = InputSpec().make_feeds(PAIR)
    assert {name: array.shape for name, array in feeds.items()} == {"a": (1, 3), "b": (1, 1)}
    (warning,) = warnings
    assert "unknown sizes of the input b: float32[?, ?] are assumed to be 1" in warning
    signature = Signature((port("a", None, 3),), ())
    assert InputSpec().make_feeds(signature)[1] == []


def test_asking_for_modules_of_a_graph_is_said_to_be_in_vain():
    assert unused_capture_warning("ONNX", Capture.WHOLE) == ()
    (warning,) = unused_capture_warning("ONNX", Capture.MODULES)
    assert warning == "capture = 'modules' is ignored for ONNX, where every model is one graph"


@pytest.mark.parametrize(
    ("feeds", "samples"),
    [
        ({"a": A, "b": B}, 5),
        ({"a": A, "b": B[:4]}, 1),
        ({"a": A, "b": np.float32(0)}, 1),
        ({"a": A[:0], "b": B[:0]}, 1),
    ],
)
def test_a_batch_can_be_parted_where_all_inputs_have_one_length(feeds, samples):
    assert PAIR.count_samples(feeds) == samples


def test_a_batch_cannot_be_parted_where_an_axis_is_fixed():
    fixed = Signature(PAIR.inputs, (port("y", 5, 2),))
    assert fixed.count_samples({"a": A, "b": B}) == 1


def test_parts_hold_all_samples_in_order():
    parts = list(in_parts({"a": A, "b": B}, 5, 2))
    assert [len(part["a"]) for part in parts] == [2, 2, 1]
    np.testing.assert_array_equal(np.concatenate([part["b"] for part in parts]), B)
    assert list(in_parts({"a": A}, 5, 5)) == [{"a": A}]


def test_free_names_are_numbered():
    assert unique_name("a", {"b"}) == "a"
    assert unique_name("a", {"a", "a_1"}) == "a_2"
    assert unique_name("a", {"a"}, first=2) == "a_2"


def test_details_are_read_as_they_were_written(tmp_path):
    file = tmp_path / "details.json"
    write_details(file, {"signature": PAIR.to_dict(), "ops": {"a": "b"}})
    kind = record({"signature": Signature.from_dict, "ops": mapping_of(string)})
    assert read_details(file, kind) == {"signature": PAIR, "ops": {"a": "b"}}


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"inputs": 3}', '{"inputs": [{}]}'])
def test_damaged_details_are_refused_by_name(content, tmp_path):
    file = tmp_path / "details.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ModelLoadError, match=r"details\.json'"):
        read_details(file, Signature.from_dict)


def test_an_example_is_not_made_up_of_sizes_that_fill_the_memory():
    data = PAIR.to_dict()
    data["inputs"][0]["shape"] = [None, 10**6, 10**6]
    with pytest.raises(NeuralMPError, match="expected sizes whose product is at most"):
        Signature.from_dict(data)


@pytest.mark.parametrize("dtype", ["i4,i4", "S99999999", "int99", "", 3, ["int8"]])
def test_an_element_type_is_one_by_name(dtype):
    data = PAIR.to_dict()
    data["inputs"][0]["dtype"] = dtype
    with pytest.raises(NeuralMPError, match="expected"):
        Signature.from_dict(data)


def test_outputs_that_are_returned_are_there():
    data = {**PAIR.to_dict(), "returns": {"x": [0, 99]}}
    with pytest.raises(NeuralMPError, match="found 99"):
        Signature.from_dict(data)


OPTIONAL = Signature(
    (
        port("a", None, 3),
        TensorSpec("keep", "keep:0", FLOAT, (), default=np.float32(1).reshape(())),
    ),
    (port("y", None, 2),),
)
HALF = np.float32(0.5)


@pytest.mark.parametrize(
    ("batch", "keep"),
    [(A, 1), ((A,), 1), ({"a": A}, 1), ((A, HALF), 0.5), ({"keep": HALF, "a": A}, 0.5)],
)
def test_an_optional_input_has_its_default_unless_the_batch_holds_it(batch, keep):
    feeds = OPTIONAL.bind_inputs(batch)
    assert feeds["a"] is A
    assert feeds["keep:0"] == keep


def test_required_inputs_are_bound_by_position_wherever_the_optional_ones_stand():
    signature = Signature((*OPTIONAL.inputs[::-1], port("b", None, None)), ())
    feeds = signature.bind_inputs((A, B))
    assert feeds["a"] is A
    assert feeds["b"] is B
    assert feeds["keep:0"] == 1


@pytest.mark.parametrize("batch", [{"keep": HALF}, (A, HALF, B), ()])
def test_a_missing_input_is_refused_with_the_option_that_names_the_inputs(batch):
    with pytest.raises(DataError, match="inputs=") if batch else pytest.raises(DataError):
        OPTIONAL.bind_inputs(batch)


@pytest.mark.parametrize("value", [1.5, -np.inf, np.nan, [[1.0, 2.0]], np.zeros((0, 3))])
def test_a_saved_signature_keeps_the_defaults(tmp_path, value):
    default = np.asarray(value, np.float32)
    optional = TensorSpec("b", "b", FLOAT, None, default=default)
    signature = Signature((port("a", None, 3), optional), (port("y"),))
    write_details(tmp_path / "details.json", signature.to_dict())
    restored = read_details(tmp_path / "details.json", Signature.from_dict)
    assert restored == signature
    assert not restored.inputs[0].is_optional
    assert restored.inputs[1].default.dtype == np.float32
    np.testing.assert_array_equal(restored.inputs[1].default.ravel(), default.ravel())


@pytest.mark.parametrize("default", [["a"], "1", {"a": 1}, [[1.0], 2.0], float("inf")])
def test_a_damaged_default_is_refused(default):
    data = TensorSpec("b", "b", np.dtype(np.int32), ()).to_dict() | {"default": default}
    with pytest.raises(NeuralMPError, match="default|number"):
        TensorSpec.from_dict(data)
