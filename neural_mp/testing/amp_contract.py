"""Contract of four-list auto mixed precision in all frameworks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neural_mp import AutoMixedPrecisionOptions, MixedPrecision
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.amp import LEVEL, PREFIXES, SWITCH, build_canonical_lists
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError
from neural_mp.testing.fixtures import machine
from neural_mp.testing.on_digits import OnDigits

#: Expected colours of the net by the canonical lists, derived by hand from the rules: the average
#: is INFER without a 16-bit producer; the exponential is DENY, which extends to the addition and
#: the softmax after it and the negation between; tanh (ALLOW) extends to the concatenation.
COLOURS = {
    "avg_pool": "plain",
    "conv": "allowed",
    "relu": "allowed",
    "reshape": "allowed",
    "matmul": "allowed",
    "exp": "denied",
    "neg": "denied",
    "add": "denied",
    "softmax": "denied",
    "mean": "allowed",
    "tanh": "allowed",
    "concat": "allowed",
}
SIXTEEN = [Precision.BF16, Precision.FP16]


class AmpContract(OnDigits):
    """Contract of auto mixed precision; subclasses define `net`, with one op of each kind.

    [batch, 1, 8, 8] → average over 2 × 2 → convolution → relu → r;
    r → reshape → product → m; m + -exp(m) → softmax; r → mean → tanh; both concatenated.
    """

    #: Op types of these kinds in the framework.
    average: str
    softmax: str
    #: Example inputs, if the framework requires them.
    example: Any = None

    @pytest.fixture(scope="class")
    @classmethod
    def net(cls) -> Any:
        raise NotImplementedError

    #: Colours of the kinds of ops; frameworks that fuse ops on loading override them.
    colours: Mapping[str, str] = COLOURS
    #: Kinds of ops that the framework appends to name the outputs.
    outputs: tuple[str, ...] = ()
    #: Shape of an image in the framework's layout.
    shape = (1, 8, 8)

    @pytest.fixture
    def images(self) -> np.ndarray:
        return np.random.default_rng(0).random((4, *self.shape), np.float32)

    @pytest.fixture(autouse=True)
    def _sixteen_bits(self, monkeypatch):
        for name in list(os.environ):
            if name.startswith((*PREFIXES, SWITCH)):
                monkeypatch.delenv(name)
        monkeypatch.setenv("FORCE_BF16", "1")
        monkeypatch.setenv("FORCE_FP16", "1")

    def types(self) -> str:
        return f"{self.average},{self.softmax}"

    def tuned(self, net, conf=None, precisions="bf16", **amp) -> Any:
        converter = MixedPrecision(conf, amp=AutoMixedPrecisionOptions(**amp) if amp else None)
        converter.model = net
        converter.inputs = self.example
        if precisions is not None:
            converter.precisions = precisions
        return converter()

    @pytest.fixture(scope="class")
    @classmethod
    def unedited(cls) -> list[Any]:
        """Holds the result without edits, once it was made; see `default`."""
        return []

    @pytest.fixture
    def default(self, net, unedited, _sixteen_bits) -> Any:
        """Return the result in BF16 without edits."""
        unedited[:] = unedited or [self.tuned(net)]
        return unedited[0]

    def space(self, net, images):
        adaptor = adaptor_for(net)
        model = adaptor.load(net, example=images)
        lists = {p: build_canonical_lists(p).translated(adaptor.op_kinds) for p in SIXTEEN}
        return adaptor, adaptor.space(model, machine(*SIXTEEN), lists)

    def test_canonical_lists_colour_the_net_alike(self, net, images):
        adaptor, space = self.space(net, images)
        narrowed = space.restricted_to([Precision.BF16])
        plan = narrowed.resolve(narrowed.fastest_plan())
        paints = narrowed.painting(plan, Precision.BF16).paints
        kinds = {op_type: kind for kind, types in adaptor.op_kinds.items() for op_type in types}
        colours = {
            kinds.get(space.graph[op].type): paint.colour.value
            for op, paint in paints.items()
            if Precision.BF16 in space.capabilities[op].precisions  # without shape ops
        }
        assert colours == {**self.colours} | dict.fromkeys(self.outputs, "allowed")

    def test_the_frameworks_own_lists_agree_with_them(self, net, images):
        adaptor, space = self.space(net, images)
        for precision in SIXTEEN:
            own = adaptor.amp_lists(precision)
            for op in space.graph:
                canonical = space.lists[precision].of(op.type)
                assert canonical is None or own.of(op.type) is canonical, op.type

    def precisions(self, result) -> dict[str, str]:
        return {op: config.precision.value for op, config in result.plan.items()}

    def changed(self, net, baseline, conf=None, precisions="bf16", **amp) -> set[str]:
        """Return the types of the ops whose precision differs from that in `baseline`."""
        result = self.tuned(net, conf, precisions, **amp)
        adaptor = adaptor_for(net)
        model = adaptor.load(net, example=np.zeros((2, *self.shape), np.float32))
        old, new = self.precisions(baseline), self.precisions(result)
        assert set(old) == set(new)
        graph = adaptor.graph(model)
        return {graph[op].type for op in old if old[op] != new[op]}

    def test_moving_two_types_in_python_changes_just_those(self, net, default):
        moved = {"inferlist_remove": self.types(), "allowlist_add": self.types().split(",")}
        assert self.changed(net, default, **moved) == {self.average, self.softmax}

    def test_moving_them_in_yaml(self, net, default, tmp_path):
        (tmp_path / "conf.yaml").write_text(
            f"mixed_precision:\n  precisions: bf16\n  inferlist_remove: [{self.types()}]\n"
            f"  allowlist_add: '{self.types()}'\n"
        )
        assert self.changed(net, default, tmp_path / "conf.yaml") == {self.average, self.softmax}

    @pytest.mark.parametrize("prefix", PREFIXES)
    def test_moving_them_by_the_environment(self, net, default, monkeypatch, prefix):
        baseline = self.precisions(default)
        monkeypatch.setenv(f"{prefix}INFERLIST_REMOVE", self.types())
        monkeypatch.setenv(f"{prefix}ALLOWLIST_ADD", self.types())
        result = self.tuned(net)
        current = self.precisions(result)
        assert sum(baseline[op] != current[op] for op in baseline) == 2
        assert list(baseline.values()).count("fp32") == list(current.values()).count("fp32") + 2
        assert f"allowlist_add: {self.types().replace(',', ', ')} " in " ".join(result.report.amp)
        assert f"(from {prefix}ALLOWLIST_ADD)" in result.report.amp[0]

    def test_where_two_places_disagree_python_counts_then_yaml(self, net, monkeypatch, tmp_path):
        prefix = PREFIXES[0]
        monkeypatch.setenv(f"{prefix}INFERLIST_REMOVE", self.types())
        monkeypatch.setenv(f"{prefix}ALLOWLIST_ADD", self.types())
        (tmp_path / "conf.yaml").write_text(
            f"mixed_precision: {{inferlist_remove: {self.softmax}, allowlist_add: {self.softmax}}}"
        )
        by_environment = self.tuned(net)
        by_yaml = self.tuned(net, tmp_path / "conf.yaml")
        by_python = self.tuned(
            net, tmp_path / "conf.yaml", inferlist_remove=self.average, allowlist_add=self.average
        )
        counts = [
            {kind: result.report.op_counts[kind] for kind in (self.average, self.softmax)}
            for result in (by_environment, by_yaml, by_python)
        ]
        low, high = {"bf16": 1}, {"fp32": 1}
        assert counts == [
            {self.average: low, self.softmax: low},
            {self.average: high, self.softmax: low},
            {self.average: low, self.softmax: high},
        ]
        assert by_python.report.amp[0].endswith("(from amp.allowlist_add)")

    def test_everything_can_be_forced(self, net, images):
        result = self.tuned(net, unsafe_force_all=True)
        assert set(self.precisions(result).values()) == {"bf16"}
        difference = np.abs(result(images) - self.tuned(net, precisions="fp32")(images))
        # Bound for a dozen roundings to 8 bits, and exponentials of magnitude 1.
        assert difference.max() < 0.1

    def test_the_level_of_tensorflows_own_pass_means_here_what_it_means_there(
        self, net, default, monkeypatch
    ):
        monkeypatch.setenv(LEVEL, "unsafe_force_all")
        result = self.tuned(net)
        assert set(self.precisions(result).values()) == {"bf16"}
        assert result.report.amp == (f"unsafe_force_all: True (from {LEVEL})",)
        monkeypatch.setenv(LEVEL, "TREAT_INFER_AS_DENY")
        result = self.tuned(net)
        monkeypatch.delenv(LEVEL)
        infer = adaptor_for(net).amp_lists(Precision.BF16).infer & set(result.report.op_counts)
        moved = self.tuned(net, inferlist_remove=list(infer), denylist_add=list(infer))
        assert self.precisions(result) == self.precisions(moved)
        assert self.precisions(result) != self.precisions(default)
        monkeypatch.setenv(LEVEL, "FORCE_ALL")
        with pytest.raises(ConfigurationError, match=r"did you mean 'UNSAFE_FORCE_ALL'"):
            self.tuned(net)

    def test_the_switch_of_tensorflows_extension_asks_for_a_16_bit_precision(
        self, net, monkeypatch
    ):
        monkeypatch.setenv(SWITCH, "1")
        result = self.tuned(net, precisions=None)
        assert result.plan.counts()["bf16"] >= 2
        assert result.report.amp == (f"auto_mixed_precision: on (from {SWITCH})",)
        asks = f"{SWITCH} requires a 16-bit precision, but precisions are fp32; "
        asks += "the variable is ignored"
        fp32 = self.tuned(net, precisions="fp32")
        assert set(fp32.plan.counts()) == {"fp32"}
        assert asks in fp32.report.warnings
        assert not any(
            SWITCH in warning for warning in self.tuned(net, precisions="fp16").report.warnings
        )
        monkeypatch.setenv(f"{PREFIXES[1]}DATA_TYPE", "FLOAT16")
        assert self.tuned(net, precisions=None).plan.counts()["fp16"] >= 2
        monkeypatch.setenv(SWITCH, "0")
        assert asks not in self.tuned(net, precisions="fp32").report.warnings

    def test_the_data_type_is_the_16_bit_precision(self, net, monkeypatch):
        counts = self.tuned(net, precisions=None, data_type="FLOAT16").plan.counts()
        assert "bf16" not in counts
        assert counts["fp16"] >= 2
        monkeypatch.setenv(f"{PREFIXES[1]}DATA_TYPE", "FLOAT16")
        assert self.tuned(net, precisions=None).plan.counts() == counts
        bf16 = self.tuned(net, precisions="bf16")
        assert "fp16" not in bf16.plan.counts()
        assert any("DATA_TYPE requires fp16" in warning for warning in bf16.report.warnings)
        with pytest.raises(ConfigurationError, match=r"amp.data_type requires fp16, but precis"):
            self.tuned(net, precisions="int8,bf16", data_type="FLOAT16")

    def test_a_type_the_framework_does_not_have(self, net):
        wrong = f"{self.softmax}x"
        with pytest.raises(
            UnknownOperatorError,
            match=rf"amp.denylist_add names '{wrong}'.*did you mean '{self.softmax}'",
        ):
            self.tuned(net, denylist_add=wrong)

    def test_a_type_that_stands_on_another_list(self, net):
        with pytest.raises(ConfigurationError, match="remove the type from that list"):
            self.tuned(net, denylist_add=self.softmax)

    def test_edits_without_16_bits_say_that_they_have_no_effect(self, net):
        result = self.tuned(net, precisions="fp32", inferlist_remove=self.softmax)
        assert any("inferlist_remove has no effect" in w for w in result.report.warnings)

    def test_what_was_decided_is_written_where_asked(self, net, tmp_path):
        result = self.tuned(net, log_path=tmp_path / "log")
        names = {path.name for path in (tmp_path / "log").iterdir()}
        assert {"paint_bf16.tsv"} < names
        assert {name.split(".")[0] for name in names} == {"before", "after", "paint_bf16"}
        assert len(names) == 5
        header, *rows = (tmp_path / "log" / "paint_bf16.tsv").read_text().splitlines()
        assert header.split("\t") == ["op", "type", "list", "colour", "runs in", "reason"]
        by_type = {row.split("\t")[1]: row.split("\t") for row in rows}
        _, _, stands_on, colour, runs_in, reason = by_type[self.softmax]
        assert (stands_on, colour, runs_in) == ("infer", "denied", "fp32")
        assert reason.startswith("INFER, denied: downstream of ")
        assert " through " in reason
        assert sum("\tbf16\t" in row for row in rows) == result.plan.counts()["bf16"]

    def test_the_stock_line(self, default):
        report = default.report
        nodes = sum(sum(by.values()) for by in report.op_counts.values())
        low = sum(by.get("bf16", 0) for by in report.op_counts.values())
        assert low == 7 + len(self.outputs)  # see COLOURS
        assert report.converted == (
            f"Converted {low}/{nodes} nodes to bfloat16 using {report.casts} casts",
        )
        assert replace(report, op_counts={}).converted == ()

    def test_a_saved_plan_means_the_same_without_the_edits(self, net, images, tmp_path):
        from neural_mp.api.replay import convert_with_plan

        moved = {"inferlist_remove": self.types(), "allowlist_add": self.types()}
        result = self.tuned(net, **moved)
        result.save_plan(tmp_path / "plan.yaml")
        again = convert_with_plan(net, tmp_path / "plan.yaml", inputs=self.example)
        assert again.plan == result.plan
        np.testing.assert_array_equal(again(images), result(images))
