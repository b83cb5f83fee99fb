"""No code from files: what a program's file may hold, and that what people export still loads."""

from __future__ import annotations

import io
import json
import zipfile
from collections import OrderedDict
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn
from torch.export import Dim, export
from torch.utils import _pytree as pytree

from neural_mp.adaptors.pytorch.pt2.archive import read_program
from neural_mp.adaptors.pytorch.pt2.op_allowlist import check_call_target
from neural_mp.adaptors.pytorch.pt2.program_json import check_payload_list, check_tree_spec
from neural_mp.adaptors.pytorch.pt2.safe_unpickler import read_plain
from neural_mp.adaptors.pytorch.pt2.size_expressions import render_expression
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import ModelLoadError
from neural_mp.util.validators import InvalidValueError, format_located_error


class Sizes(nn.Module):
    """Sizes worked out of sizes, of inputs and of data."""

    def forward(self, x, y):
        count = x.shape[0]
        rows = torch.cat([x, y])
        chosen = x.sum(1).nonzero()
        return rows.reshape(-1, 2), rows[: (count * 3) // 2], torch.arange(count**2 % 7), chosen


class Kinds(nn.Module):
    """Parameters that are shared, buffers, constants, and data types of many kinds."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks = nn.ModuleDict({"a-b c": nn.Linear(4, 4)})
        self.register_buffer("low", torch.zeros(4, dtype=torch.bfloat16))
        self.register_buffer("aside", torch.ones(4), persistent=False)
        self.turned = torch.arange(8.0).reshape(2, 4).t()
        self.empty, self.repeated = torch.zeros(0, 4), torch.ones(1).expand(4)

    def forward(self, tokens, *, flag=True, word="a", factor=1.5, more=None):
        outputs = self.head(
            self.blocks["a-b c"](self.embedding(tokens)) * self.aside * self.repeated
        )
        if more is not None:
            outputs = outputs * more["by"][0]
        limited = outputs.clamp(float("-inf"), 1e4) * factor
        return OrderedDict(
            a=(limited, [self.low + 1]), b=(self.turned @ self.turned.t()), c=self.empty
        )


class Branches(nn.Module):
    def forward(self, x):
        with torch.no_grad():
            y = x * 2
        return torch.cond(y.sum() > 0, lambda a: a + 1, lambda a: a - 1, (y,))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.LSTM(4, 5, 2, bidirectional=True)

    def forward(self, x):
        return self.layer(x)[0]


#: Programs that people export.
PROGRAMS = {
    "sizes": lambda: export(
        Sizes(), (torch.ones(4, 4), torch.ones(8, 4)), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO})
    ),
    "kinds": lambda: export(
        Kinds(),
        (torch.tensor([1, 2]),),
        kwargs={"flag": True, "word": "b", "factor": 2.5, "more": {"by": [torch.ones(10)]}},
    ),
    "branches": lambda: export(
        Branches().eval(), (torch.ones(4, 3),), dynamic_shapes=({0: Dim("batch", min=2)},)
    ),
    "recurrent": lambda: export(
        Recurrent(), (torch.ones(3, 2, 4),), dynamic_shapes=({1: Dim("batch", min=2)},)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROGRAMS)
def test_what_is_read_is_what_pytorch_would_read(kind, tmp_path):
    torch.manual_seed(0)
    path = tmp_path / "net.pt2"
    torch.export.save(PROGRAMS[kind](), path, extra_files={"notes.txt": "ours"})
    theirs, ours = torch.export.load(path), read_program(path)
    assert ours.graph_module.code == theirs.graph_module.code
    assert str(ours.graph_signature) == str(theirs.graph_signature)
    assert str(ours.range_constraints) == str(theirs.range_constraints)
    args, named = theirs.example_inputs
    same(ours.example_inputs, (args, named))
    same(ours.module()(*args, **named), theirs.module()(*args, **named))


def same(actual, expected):
    assert pytree.tree_structure(actual) == pytree.tree_structure(expected)
    pairs = zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True)
    for leaf, reference in pairs:
        assert torch.equal(leaf, reference) if isinstance(leaf, torch.Tensor) else leaf == reference


def test_shared_weights_are_read_once(tmp_path):
    torch.export.save(PROGRAMS["kinds"](), tmp_path / "net.pt2")
    weights = read_program(tmp_path / "net.pt2").state_dict
    assert weights["head.weight"].data_ptr() == weights["embedding.weight"].data_ptr()


@pytest.mark.parametrize(
    "text",
    [
        "Symbol('s77', positive=True, integer=True)",
        "Mul(Integer(2), Pow(Symbol('s0', positive=True, integer=True), Integer(2)))",
        "Max(Integer(1), TruncToInt(Mul(Float('1.5', precision=53), ToFloat(Symbol('s1')))))",
        "FloorDiv(Add(Symbol('u0', integer=True), Integer(-1)), Integer(2))",
        "Equality(Mod(Symbol('s0', positive=True, integer=True), Integer(8)), Integer(0))",
    ],
)
def test_what_pytorch_writes_of_sizes_stays_as_it_is(text):
    assert render_expression(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [("s0 + 2*s1", "(s0 + (2 * s1))"), ("(3*s0)//2", "((3 * s0) // 2)"), ("s0**2", "(s0 ** 2)")],
)
def test_sizes_as_older_versions_write_them_mean_the_same(text, expected):
    assert render_expression(text) == expected


def test_a_size_in_several_cases_is_read():
    u0 = sympy.Symbol("u0", integer=True)
    size = sympy.Piecewise((1, sympy.Eq(u0, 1)), (64 * u0, True))
    parsed = sympy.sympify(render_expression(sympy.srepr(size)))
    assert [parsed.subs(u0, value) for value in (1, 2)] == [1, 128]


def test_a_size_in_many_cases_is_refused():
    u0 = sympy.Symbol("u0", integer=True)
    pairs = [(case, sympy.Eq(u0, case)) for case in range(200)]
    with pytest.raises(ValueError, match="not an expression of sizes"):
        render_expression(sympy.srepr(sympy.Piecewise(*pairs)))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "Symbol('__import__(\"os\")')",
        "Max(1, open('/etc/passwd'))",
        "s0.__class__",
        "Symbol('s0', cls=1)",
        "[s0 for s0 in ()]",
        "(lambda: s0)()",
        "f'{s0}'",
        "s0 if s1 else s0",
        "s0; s1",
        "Function('f')",
        "2**2**2**99",
        "(s0**8)**8",
        "Pow(Integer(2), Symbol('s0'))",
        "LShift(Integer(1), Integer(10000000000))",
        "Float('1', precision=999999999)",
        "9" * 100,
        "(" * 5000 + "s0" + ")" * 5000,
        "-" * 5000 + "1",
        "s0" + "+s0" * 5000,
        "u99999999999",
        "",
        f"({'+'.join(f's{n}' for n in range(10))})**16",
        "*".join(f"(s{n} + 1)" for n in range(20)),
        f"Mod(Pow(Add({', '.join(f's{n}' for n in range(10))}), Integer(8)), s0)",
        f"Max({', '.join(f's{n}*s{n + 1}' for n in range(300))})",
        f"{'Max(Min(' * 10}s0{', s1), s2)' * 10}",
    ],
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="expression"):
        render_expression(text)


@pytest.mark.parametrize(
    "target",
    [
        "torch.os.system",
        "torch.hub.load",
        "torch.load",
        "os.system",
        "math.factorial",
        "_operator.methodcaller",
        "torch.ops.aten.save.default",
        "torch.ops.aten.from_file.default",
        "torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default",
        "torch.ops.aten.adaptive_max_pool2d_backward.default",
        "torch.ops.aten.segment_reduce.default",
        "torch.ops.aten.add.__class__",
        "torch.ops.debugprims.load_tensor.default",
        "torch.ops.higher_order.triton_kernel_wrapper_functional",
        "#extension:op",
    ],
)
def test_only_ops_are_called(target):
    with pytest.raises(ValueError, match="the program calls"):
        check_call_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "torch.ops.aten.__and__.Tensor",
        "torch.ops.higher_order.cond",
        "_operator.mul",
        "torch.sym_max",
    ],
)
def test_ops_of_exported_models_are_called(target):
    assert check_call_target(target) == target


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        ("builtins.dict", '[{"__enum__": true, "fqn": "this:s", "name": "x"}]'),
        (
            "collections.defaultdict",
            {"default_factory_module": "this", "default_factory_name": "s", "dict_context": []},
        ),
        ("subprocess.Popen", "null"),
        ("collections.namedtuple", "os.stat_result"),
    ],
)
def test_a_nesting_imports_nothing(kind, context):
    tree = {"type": kind, "context": context, "children_spec": []}
    with pytest.raises(ValueError, match="expected .*, got|takes or returns"):
        check_tree_spec(json.dumps([1, tree]))


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2, 3).t(),
        nn.Parameter(torch.ones(3), requires_grad=False),
        {"a": [torch.zeros(0), (torch.tensor(1 + 2j), None)], "b": 2.5},
        torch.ones(4, dtype=torch.uint16),
    ],
)
def test_plain_tensors_are_unpickled(value):
    written = io.BytesIO()
    torch.save(value, written)
    torch.testing.assert_close(read_plain(written), value, rtol=0, atol=0)


@pytest.mark.parametrize(
    "sizes", [{0: Dim.DYNAMIC}, {0: Dim("batch", min=2, max=64)}, {0: Dim.AUTO}], ids=str
)
def test_inputs_on_which_exporting_left_notes_are_read_without_them(sizes, tmp_path):
    inputs = torch.arange(8.0).reshape(2, 4)
    program = export(nn.Linear(4, 3), (inputs,), dynamic_shapes=(sizes,))
    torch._dynamo.maybe_mark_dynamic(inputs, 1)
    torch._dynamo.mark_dynamic(inputs, 0, min=2, max=64)
    torch.export.save(program, tmp_path / "net.pt2")
    (loaded,), _ = read_program(tmp_path / "net.pt2").example_inputs
    torch.testing.assert_close(loaded, inputs, rtol=0, atol=0)
    assert not vars(loaded)


def test_parameters_with_attributes_are_unpickled_without_them():
    value = nn.Parameter(torch.ones(3))
    value.note = {"axes": {0, 1}}
    written = io.BytesIO()
    torch.save(value, written)
    parameter = read_plain(written)
    assert isinstance(parameter, nn.Parameter)
    assert not hasattr(parameter, "note")


class Traced(torch.Tensor):
    """A class of the user's own."""


def test_a_tensor_of_a_class_of_its_own_is_refused():
    written = io.BytesIO()
    torch.save(torch.ones(2).as_subclass(Traced), written)
    with pytest.raises(ValueError, match="Traced"):
        read_plain(written)


def test_a_pickle_that_goes_round_in_circles_is_refused():
    circle: list[object] = []
    for _ in range(40):
        circle = [circle, circle]
    written = io.BytesIO()
    torch.save(circle, written)
    with pytest.raises(ValueError, match="exceed the limit"):
        read_plain(written)


#: A tuple of two tuples of two tuples…: a value in every step that looks at all of it.
_ENDLESS = b")" + b"q\x00h\x00\x86" * 60


def _pickle(code: bytes) -> io.BytesIO:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + code + b".")
    return written


@pytest.mark.parametrize(
    "code",
    [
        b"}" + _ENDLESS + b"K\x01s",
        b"}(" + _ENDLESS + b"K\x01u",
        b"ccollections\nOrderedDict\n](" + _ENDLESS + b"K\x01\x86e\x85R",
        b"ctorch.serialization\n_get_layout\n(" + _ENDLESS + b"tR",
        _ENDLESS + b"Q",
        b"ctorch._utils\n_rebuild_parameter\nN}X\x0c\x00\x00\x00__defaults__)s\x86b",
    ],
    ids=["key", "keys", "pairs", "argument", "storage", "function"],
)
def test_a_pickle_without_end_is_refused_at_once(code):
    refusal = "must be (names|torch.strided)|pickle (is damaged|contains)|expected tensors"
    with pytest.raises(ValueError, match=refusal):
        read_plain(_pickle(code))


def test_a_set_in_a_pickle_is_not_made():
    with pytest.raises(ValueError, match="_Attribute"):
        read_plain(_pickle(b"cbuiltins\nset\n](" + _ENDLESS + b"e\x85R"))


def test_a_number_that_a_pickle_gives_to_a_value_takes_no_room():
    assert read_plain(_pickle(b"K\x01r\xff\xff\xff\x7f")) == 1


def test_extra_files_that_are_libraries_are_refused(tmp_path):
    path = tmp_path / "net.pt2"
    torch.export.save(PROGRAMS["recurrent"](), path)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/extra/notes.txt", b"\x7fELF")
    with pytest.raises(ModelLoadError, match="contains code"):
        adaptor_for(str(path)).load(str(path))


def test_a_class_of_transformers_is_a_class_of_models(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.BertModel(config).save_pretrained(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**text, "architectures": ["pipeline"]}))
    with pytest.raises(ModelLoadError, match="must name a model class, got 'pipeline'"):
        adaptor_for(str(tmp_path)).load(str(tmp_path))


@pytest.mark.parametrize(
    ("device", "expected"),
    [("gpu", "one of cpu, .*, found 'gpu'"), ([], r"one of cpu, .*, found \[\]")],
)
def test_an_error_in_a_program_names_the_way_to_the_value(device, expected):
    meta = dict.fromkeys(("dtype", "layout"), 1) | {"sizes": [], "strides": []}
    meta |= {"requires_grad": False, "storage_offset": {"as_int": 0}, "device": {"type": device}}
    where = {"path_name": "weight_0", "is_param": True, "use_pickle": False, "tensor_meta": meta}
    with pytest.raises(InvalidValueError, match=expected) as caught:
        check_payload_list(json.dumps({"config": {"a": where}}).encode())
    assert format_located_error(caught.value).startswith(
        "config.a.tensor_meta.device.type: expected"
    )
