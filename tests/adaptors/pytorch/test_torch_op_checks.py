"""Ops of programs in files: those that are taken, those that are trusted, and their arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from program_files import Net, changed, saved
from torch.export import export

import neural_mp
from neural_mp.adaptors.pytorch.pt2.archive import read_program
from neural_mp.adaptors.pytorch.pt2.argument_checks import find_faults
from neural_mp.adaptors.pytorch.pt2.op_allowlist import check_call_target, list_allowed_ops
from neural_mp.api.loading import load_source
from neural_mp.errors import ModelLoadError

aten = torch.ops.aten
FLOATS, INDICES = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)


INTERNALS = (
    "max_pool2d_with_indices_backward",
    "nll_loss_backward",
    "convolution_backward",
    "_embedding_bag_forward_only",
    "_embedding_bag_dense_backward",
    "_fused_sgd_",
    "_sobol_engine_draw",
    "_sobol_engine_scramble_",
    "_ctc_loss",
    "_ctc_loss_backward",
    "_convert_indices_from_csr_to_coo",
    "_reshape_alias",
    "resize_",
    "set_",
    "lu_unpack",
    "_fused_moving_avg_obs_fq_helper",
    "embedding_dense_backward",
    "_nested_view_from_buffer",
)


@pytest.mark.parametrize("name", INTERNALS)
def test_internals_that_trust_their_arguments_are_refused(name):
    packet = getattr(aten, name)
    for overload in packet.overloads():
        with pytest.raises(ValueError, match=rf"{name}.*--trust aten\.{name}"):
            check_call_target(f"torch.ops.aten.{name}.{overload}")


@pytest.mark.parametrize("target", ["aten.remainder.int", "aten.add.out", "aten.to.prim_dtype"])
def test_variants_that_no_export_contains_are_refused(target):
    with pytest.raises(ValueError, match="not registered"):
        check_call_target(f"torch.ops.{target}")


def test_core_aten_is_taken_without_gradients():
    names = torch._C._dispatch_get_all_op_names()
    core = set()
    for name in (n.removeprefix("aten::") for n in names if n.startswith("aten::")):
        packet, _, overload = name.partition(".")
        if torch.Tag.core in getattr(getattr(aten, packet), overload or "default").tags:
            core.add(packet)
    assert len(core) > 150
    refused = {name for name in core if name not in list_allowed_ops()["aten"]}
    assert {n for n in refused if "backward" not in n} <= {"resize_"}
    assert not any("backward" in name for name in list_allowed_ops()["aten"])


def test_listed_ops_exist_except_those_of_other_versions():
    packets = {n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names()}
    ours = list_allowed_ops()["aten"]
    absent = {n for n in ours if not {f"aten::{n}", f"aten::{n}_"} & packets}
    assert len(absent) < len(ours) / 20, absent


def test_a_view_beyond_its_tensor_is_refused(tmp_path):
    path = saved(tmp_path, lambda y, b: (y, aten._reshape_alias(b, [4], [1]) * 1.0))
    with pytest.raises(ModelLoadError, match="is refused: .*_reshape_alias"):
        load_source(str(path), None, None)


def test_views_are_checked_against_their_storage_by_the_op(tmp_path):
    path = saved(tmp_path, lambda y, b: (y, torch.as_strided(b, (2,), (2,))))
    assert load_source(str(path), None, None) is not None

    def enlarge(graph: dict[str, Any]) -> None:
        (node,) = (n for n in graph["nodes"] if "as_strided" in n["target"])
        node["inputs"][1]["arg"]["as_ints"] = [3000]

    # Shapes in the file are claims, so that the op itself refuses.
    model = read_program(changed(path, enlarge)).module()
    with pytest.raises(RuntimeError, match="out of bounds"):
        model(torch.ones(2, 4))


@pytest.fixture
def custom():
    """A custom op in a library of the user's own."""
    with torch.library._scoped_library("ours", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
        torch.library.register_fake("ours::twice", torch.empty_like, lib=library)
        yield torch.ops.ours.twice


def test_a_custom_op_is_refused_unless_it_is_trusted(custom, tmp_path):
    path = str(saved(tmp_path, lambda y, b: custom(y)))
    with pytest.raises(ModelLoadError, match=r"is refused.*a custom op.*--trust ours\.twice"):
        load_source(path, None, None)
    with pytest.raises(ModelLoadError, match="custom op"):
        load_source(path, None, None, trust=("ours.thrice",))
    for trust in ("ours.twice", "ours"):
        model = load_source(path, None, None, trust=(trust,))
        assert model.adaptor.predict(model.held, torch.ones(2, 4)).shape == (2, 4)
    converter = neural_mp.MixedPrecision(model=path, precisions="fp32", trust=("ours.twice",))
    assert converter.sensitivity(0) is not None
    with pytest.raises(ModelLoadError, match="custom op"):
        load_source(path, None, None)


def test_a_trusted_op_must_be_registered(tmp_path):
    with neural_mp.trusting(["absent.op"]), pytest.raises(ValueError, match="not registered"):
        check_call_target("torch.ops.absent.op.default")


def test_a_weight_must_be_as_the_graph_says(tmp_path):
    path = saved(tmp_path, lambda y, b: y + b)

    def enlarge(graph: dict[str, Any]) -> None:
        sizes = next(v for k, v in graph["tensor_values"].items() if "weight" in k)["sizes"]
        sizes[0]["as_int"] = 4000

    with pytest.raises(ModelLoadError, match=r"'layer.weight' must have the shape \(4000, 4\)"):
        load_source(str(changed(path, enlarge)), None, None)


def _norm(y, b):
    return aten._native_batch_norm_legit_no_training(y, b, b, b, b, 0.1, 1e-5)[0]


def _shrink(graph: dict[str, Any]) -> None:
    """Make a view smaller, although the graph still says what it was."""
    (node,) = (n for n in graph["nodes"] if "slice" in n["target"])
    node["inputs"][3]["arg"] = {"as_int": 1}


def test_shapes_are_derived_from_weights_rather_than_taken_from_the_file(tmp_path):
    path = saved(tmp_path, lambda y, b: _norm(y, b[0:4]), torch.ones(8))
    assert load_source(str(path), None, None) is not None
    with pytest.raises(
        ModelLoadError, match=r"weight must have a value per channel \(4\), got \(1,"
    ):
        load_source(str(changed(path, _shrink)), None, None)


def test_bags_of_embeddings_must_begin_in_ascending_order(tmp_path):
    weight, ids = torch.ones(5, 4), torch.tensor([0, 1, 2, 3])

    def run(y, b):
        return y, F.embedding_bag(ids.clone(), weight.clone(), b, mode="sum")

    path = saved(tmp_path, run, torch.tensor([0, 2, 3]))
    assert load_source(str(path), None, None) is not None
    hostile = saved(tmp_path, run, torch.tensor([0, -(10**9), 3]))
    with pytest.raises(ModelLoadError, match="offsets must be numbers in ascending order"):
        load_source(str(hostile), None, None)


LSTM = (torch.ones(3, 2, 4), [torch.ones(1, 2, 4)] * 2)
LSTM_WEIGHTS = [torch.ones(16, 4), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
LSTM_OPTIONS = (True, 1, 0.0, False, False, False)
COMPLEX = torch.ones(2, 4, dtype=torch.complex64)
QUERY = torch.ones(1, 2, 3, 4)
CALLS = {
    "norm": (aten.native_batch_norm.default, (FLOATS, *[torch.ones(4)] * 4, False, 0.1, 1e-5)),
    "weight norm": (aten._weight_norm.default, (FLOATS, torch.ones(2, 1), 0)),
    "real": (aten._fft_r2c.default, (FLOATS, [0, 1], 0, True)),
    "complex": (aten._fft_c2c.default, (COMPLEX, [1], 1, True)),
    "inverse": (aten._fft_c2r.default, (COMPLEX, [1], 2, 6)),
    "recurrent": (aten.lstm.input, (*LSTM, LSTM_WEIGHTS, *LSTM_OPTIONS)),
    "attention": (aten._scaled_dot_product_flash_attention_for_cpu.default, (QUERY,) * 3),
    "power": (aten.linalg_matrix_power.default, (torch.eye(4), 3)),
}
FAULTS = [
    ("norm", 1, torch.ones(1), "weight must have a value per channel"),
    ("norm", 3, None, "running_mean must be given"),
    ("norm", 0, torch.ones(4), "at least 2 axes"),
    ("norm", 2, torch.ones(4).double(), "weights must be of the type"),
    ("weight norm", 1, torch.ones(1, 1), "g must have the shape"),
    ("weight norm", 2, 7, "dim must be an axis"),
    ("real", 1, [3], "dim must name different axes"),
    ("real", 1, [0, 0], "dim must name different axes"),
    ("real", 0, COMPLEX, "input must be of floats"),
    ("complex", 2, 9, "normalization must be"),
    ("complex", 0, FLOATS, "input must be of complex numbers"),
    ("inverse", 3, 10**9, "last_dim_size must suit"),
    ("recurrent", 1, [torch.ones(1, 2, 1)] * 2, "params must have the shapes"),
    ("recurrent", 2, LSTM_WEIGHTS[:1], "params must have the shapes"),
    ("recurrent", 4, 10**9, "1 to 1000 layers"),
    ("recurrent", 1, [torch.ones(1, 9, 4)] * 2, "states must be of"),
    ("attention", 1, torch.ones(1, 2, 3, 9), "key and value must have"),
    ("attention", 0, torch.ones(1, 2, 0, 4), "must not be empty"),
    ("power", 1, -(2**63), "n must have 32 bits"),
]


@pytest.mark.parametrize("name", CALLS)
def test_arguments_that_fit_are_taken(name):
    op, args = CALLS[name]
    assert not list(find_faults(op, args, {}))
    op(*args)


@pytest.mark.parametrize(("name", "position", "value", "fault"), FAULTS)
def test_arguments_that_a_kernel_does_not_check_are_refused(name, position, value, fault):
    op, args = CALLS[name]
    changed = (*args[:position], value, *args[position + 1 :])
    assert fault in " ".join(find_faults(op, changed, {}))


def test_powers_of_sizes_are_small(tmp_path):
    path = tmp_path / "net.pt2"
    dynamic = ({0: torch.export.Dim("b", min=2, max=64)},)
    net = Net(lambda y, b: y.new_zeros(y.shape[0] ** 2))
    torch.export.save(export(net, (torch.ones(4, 4),), dynamic_shapes=dynamic), path)
    assert load_source(str(path), None, None) is not None

    def grow(graph: dict[str, Any]) -> None:
        for node in graph["nodes"]:
            if node["target"] == "_operator.pow":
                node["inputs"][1]["arg"] = {"as_int": 10**9}

    with pytest.raises(ModelLoadError, match="exponent"):
        load_source(str(changed(path, grow)), None, None)
