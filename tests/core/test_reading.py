"""A damaged or hostile file is one short error that names the file, the key and what was found."""

import gzip
import json
import zlib

import pytest

from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan, load_plan_file
from neural_mp.core.precision import Precision
from neural_mp.errors import HistoryError, NeuralMPError, PlanError
from neural_mp.io.limits import MAX_FILE_BYTES
from neural_mp.io.readers import compress_text, decompress_bounded, parse_json, read_json
from neural_mp.io.yaml_reader import YamlError, load_yaml, load_yaml_with_lines
from neural_mp.util.validators import (
    enum_of,
    finite,
    list_of,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    record,
    string,
)

_BOMB = "\n".join(
    ["a0: &a0 {precision: fp32}"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
)

HOSTILE = {
    "aliases that multiply": f"neural_mp_plan: 2\n{_BOMB}\nops: {{conv: *a11}}",
    "an alias of itself": "neural_mp_plan: 2\nops: &ops {conv: *ops}",
    "deep lists": f"neural_mp_plan: 2\nops: {'[' * 200_000}",
    "deep mappings": f"neural_mp_plan: 2\nops: {'{a: ' * 200_000}",
    "deep lines": f"{'- ' * 200_000}a",
    "merged words": "neural_mp_plan: 2\nops: {<<: [fp32]}",
    "base 60": f"neural_mp_plan: 2\nops: {{}}\nobservations: {{samples: 1{':59' * 300_000}}}",
    "many digits": f"neural_mp_plan: 2\nops: {{}}\nobservations: {{samples: {'9' * 100_000}}}",
    "a tag": "neural_mp_plan: 2\nops: !!python/object/apply:os.system [echo]",
    "a long word": f"neural_mp_plan: 2\nops: {{conv: {'fp33' * 500_000}}}",
    "a long key": f"neural_mp_plan: 2\nops:\n  ? {'conv' * 500_000}\n  : 5",
    "two documents": "neural_mp_plan: 2\nops: {}\n---\nneural_mp_plan: 1",
    "NUL": "neural_mp_plan: 2\nops: {conv: \0}",
    "nothing": "",
    "a list": "[]",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_plan_file_is_one_short_error(name, tmp_path):
    """Some would take hours, or all memory, to read as what they say."""
    file = tmp_path / "plan.yaml"
    file.write_text(HOSTILE[name])
    with pytest.raises(PlanError, match=r"plan\.yaml") as caught:
        load_plan_file(file)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("wrong", [[], {}, None, "abc", [[1.0]], True, 10**400])
@pytest.mark.parametrize(
    ("key", "around"),
    [
        ("ranges.relu.kl.0", lambda wrong: {"ranges": {"relu": {"kl": [wrong, 1.0]}}}),
        ("nsr.relu", lambda wrong: {"nsr": {"relu": wrong}}),
        ("elements.relu", lambda wrong: {"elements": {"relu": wrong}}),
        ("samples", lambda wrong: {"samples": wrong}),
        ("corrected_nsr.relu.smooth", lambda wrong: {"corrected_nsr": {"relu": {"smooth": wrong}}}),
        (
            "channels.relu.high.1",
            lambda wrong: {
                "channels": {"relu": {k: [0.0, wrong] for k in ("low", "high", "power", "mean")}}
            },
        ),
    ],
)
def test_what_is_no_number_in_observations_is_named_with_its_key(key, around, wrong):
    with pytest.raises(NeuralMPError, match="expected") as caught:
        Observations.from_dict(around(wrong))
    path = ".".join(map(str, caught.value.keys))
    assert path == key or key.startswith("channels")


def test_a_range_goes_from_low_to_high():
    with pytest.raises(NeuralMPError, match=r"low ≤ high, found \[2.0, 1.0\]"):
        Observations.from_dict({"ranges": {"relu": {"kl": [2.0, 1.0]}}})


def test_aliases_that_do_not_multiply_are_read():
    plan = PrecisionPlan.from_yaml(
        "neural_mp_plan: 2\n"
        "ops:\n"
        "  a: &int8 {precision: int8, weight: int8 symmetric per_channel}\n"
        "  b: *int8\n"
    )
    assert plan["a"] == plan["b"]


def test_merged_keys_are_read_and_own_ones_win():
    merged = "x: &x {a: 1, b: 2}\ny: &y {b: 3, c: 4}\nz: {<<: [*x, *y], c: 5, '<<': 6}"
    assert load_yaml(merged)["z"] == {"b": 2, "c": 5, "a": 1, "<<": 6}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0x1F", 31),
        ("-0b11", -3),
        ("010", 8),
        ("08", "08"),
        ("1_000", 1000),
        ("1_000.5", 1000.5),
        ("1.", 1.0),
        ("-.5", -0.5),
        ("+1E5", 1e5),
        ("1_0e5", "1_0e5"),
        ("1.2.3", "1.2.3"),
        ("--", "--"),
        ("!!float 5", 5),
        ("!!str 5", "5"),
        ("! 5", "5"),
    ],
)
def test_numbers_are_read_where_yaml_writes_them_without_quotes(text, value):
    parsed = load_yaml(f"a: {text}")["a"]
    assert (parsed, type(parsed)) == (value, type(value))


def test_lines_of_keys_and_items_are_known():
    text = "a: &a\n  b: [1,\n    2]\nc: *a\nd:\n  <<: *a\n  e: 3\na: 4"
    document = load_yaml_with_lines(text, 100)
    value, lines = document.value, document.lines
    assert lines[id(value)] == {"a": 8, "c": 4, "d": 5}
    assert document.repeated == {id(value): {"a": 1}}
    assert lines[id(value["c"])] == {"b": 2}
    assert lines[id(value["c"]["b"])] == {0: 2, 1: 3}
    assert lines[id(value["d"])] == {"b": 2, "e": 7}


def test_an_error_in_yaml_names_line_and_place():
    with pytest.raises(YamlError, match="^line 2: the tag '!x'") as caught:
        load_yaml("a:\n  - [1, {b: !x 2}]")
    assert caught.value.keys == ("a", 0, 1, "b")


def test_a_file_of_gzip_in_several_parts_is_unpacked_as_one():
    parts = gzip.compress(b"[1,") + gzip.compress(b"2]")
    assert decompress_bounded(parts) == b"[1,2]"
    with pytest.raises(NeuralMPError, match="exceeds the limit of 0 MiB"):
        decompress_bounded(parts, 4)


def test_plain_yaml_is_what_people_mean():
    text = (
        "{a: 1, b: 1e-3, c: yes, d: ~, e: .inf, f: '1', g: [x y, -2.5], 007: 2001-01-01, h: 1:30}"
    )
    assert load_yaml(text) == {
        "a": 1,
        "b": 0.001,
        "c": True,
        "d": None,
        "e": float("inf"),
        "f": "1",
        "g": ["x y", -2.5],
        "007": "2001-01-01",
        "h": "1:30",
    }


@pytest.mark.slow
@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "zlib"])
def test_what_is_packed_is_unpacked_no_further_than_a_limit(pack, tmp_path):
    file = tmp_path / "run.json.gz"
    file.write_bytes(pack(b" " * (MAX_FILE_BYTES + 1)))
    with pytest.raises(HistoryError, match=r"run\.json\.gz.*exceeds the limit of 256 MiB"):
        read_json(file, string, HistoryError)
    file.write_bytes(pack(b'{"a": 1}')[:-3])
    with pytest.raises(HistoryError, match=r"run\.json\.gz.*damaged"):
        read_json(file, string, HistoryError)
    file.write_bytes(pack(b'{"a": 1}'))
    assert read_json(file, mapping_of(non_negative_integer), HistoryError) == {"a": 1}


@pytest.mark.slow
def test_packed_text_is_bounded_too():
    with pytest.raises(HistoryError, match="trial 3.*exceeds the limit of 256 MiB"):
        parse_json(compress_text(b" " * (MAX_FILE_BYTES + 1)), string, "trial 3", HistoryError)
    assert parse_json(
        compress_text(b"[1]"), list_of(non_negative_integer), "trial 3", HistoryError
    ) == (1,)
    with pytest.raises(HistoryError, match="trial 3: damaged compressed data"):
        parse_json("no such text", string, "trial 3", HistoryError)
    with pytest.raises(HistoryError, match=r"trial 3: expected a string, found \[1\]"):
        parse_json([1], string, "trial 3", HistoryError)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b"9" * 10_000,
        b'"\\ud800"',
        b"\xff",
        b"",
        b"[[], []]" * 3,
        b"[" + b"[]," * (1 << 24),
    ],
    ids=["deep", "digits", "surrogate", "no UTF-8", "nothing", "more", "many values"],
)
def test_hostile_json_is_one_short_error(content, tmp_path):
    file = tmp_path / "details.json"
    file.write_bytes(content)
    with pytest.raises(HistoryError, match=r"details\.json") as caught:
        read_json(file, string, HistoryError)
    assert len(str(caught.value)) < 500


def test_a_file_whose_name_holds_a_nul_is_not_there():
    with pytest.raises(PlanError, match="cannot be read"):
        load_plan_file("plan\0.yaml")


def test_an_error_names_the_way_to_the_value(tmp_path):
    kind = record({"jobs": mapping_of(list_of(record({"runs in": enum_of(Precision)})))})
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"jobs": {"first": [{"runs in": "int8"}, {"runs in": "int9"}]}}))
    with pytest.raises(
        HistoryError, match=r"jobs\.first\.1\.runs in: expected one of int2, int3, int4.*'int9'"
    ):
        read_json(file, kind, HistoryError)


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (non_negative_integer, [0, 5, 2**62], [-1, True, 1.0, 2**63, "1", None]),
        (finite, [0, -1.5, 2**62], [float("inf"), float("nan"), 10**400, "1", False]),
        (number, [float("inf"), 3], [None, "x", True, 10**400]),
        (non_negative_float, [0, 2.5], [-0.1, float("inf")]),
        (string, ["", "é", "\n"], ["\ud800", 1, None, b""]),
        (optional(non_negative_integer), [None, 1], [-1]),
    ],
)
def test_kinds_take_what_they_say(kind, right, wrong):
    for value in right:
        assert kind(value) == value
    for value in wrong:
        with pytest.raises(NeuralMPError, match="expected"):
            kind(value)
