"""Kernel logs as the versions of oneDNN and ONNX Runtime write them, whole and torn."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from neural_mp.errors import ConfigurationError, KernelLogError
from neural_mp.profiling import changed_kernels, read_kernel_log, side_by_side
from neural_mp.profiling.kernel_log import Sieve

#: Version → lines that it wrote, with the kernel, type, sizes and milliseconds of the last.
VERSIONS = {
    "MKL-DNN 0.14": (
        "mkldnn_verbose,exec,reorder,undef,in:f32_nchw out:f32_nChw8c,num:1,2x16x7x7,0.484863",
        ("reorder", "", "fp32", "2x16x7x7", 0.484863),
    ),
    "MKL-DNN 0.20": (
        "mkldnn_verbose,info,Intel MKL-DNN v0.20.0 (Git Hash N/A),Intel(R) Advanced Vector "
        "Extensions 512 (Intel(R) AVX-512) with AVX512BW, AVX512VL, and AVX512DQ extensions\n"
        "mkldnn_verbose,create,convolution,jit:avx512_common,forward_training,fsrc:nChw16c "
        "fwei:OIhw16i16o fbia:undef fdst:nChw16c,alg:convolution_direct,mb100_ic128oc32,0.5\n"
        "mkldnn_verbose,exec,convolution,jit:avx512_common,forward_training,fsrc:nChw16c "
        "fwei:OIhw16i16o fbia:undef fdst:nChw16c,alg:convolution_direct,mb100_ic128oc32,0.201904",
        ("convolution", "jit:avx512_common", "unnamed", "mb100_ic128oc32", 0.201904),
    ),
    "DNNL 0.95": (
        "dnnl_verbose,info,DNNL v0.95.0 (Git Hash ce116d4),Intel(R) Advanced Vector Extensions 2 "
        "(Intel(R) AVX2)\n"
        "dnnl_verbose,exec,cpu,reorder,jit:uni,undef,src_s8::blocked:abcd:f0 "
        "dst_f32::blocked:aBcd8b:f0,num:1,2x16x7x7,0.468994",
        ("reorder", "jit:uni", "int8", "2x16x7x7", 0.468994),
    ),
    "DNNL 1.4": (
        "dnnl_verbose,info,cpu,isa:Intel AVX2\n"
        "dnnl_verbose,exec,cpu,convolution,gemm:acl,forward_training,src_f32::blocked:acdb:f0 "
        "wei_f32::blocked:acdb:f0 bia_f32::blocked:a:f0 dst_f32::blocked:acdb:f0,"
        "post_ops:'eltwise_relu;';,alg:convolution_direct,mb1_ic256oc64,1e-05",
        ("convolution", "gemm:acl", "fp32", "mb1_ic256oc64", 1e-05),
    ),
    "oneDNN 2.0 with timestamps": (
        "dnnl_verbose,info,prim_template:timestamp,operation,engine,primitive,implementation,"
        "prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time\n"
        "dnnl_verbose,1607393146348.667969,exec,cpu,reorder,jit:blk,undef,"
        "src_f32::blocked:abcd:f0 dst_f32::blocked:aBcd8b:f0,,,2x16x7x7,3.58594",
        ("reorder", "jit:blk", "fp32", "2x16x7x7", 3.58594),
    ),
    "oneDNN 3.1": (
        "onednn_verbose,info,cpu,isa:Intel AVX-512 with float16, Intel DL Boost and bfloat16 "
        "support and Intel AMX with bfloat16 and 8-bit integer support\n"
        "onednn_verbose,primitive,exec,cpu,convolution,brgconv:avx512_core_amx_int8,"
        "forward_inference,src_u8::blocked:acdb::f0 wei_s8:a:blocked:Acdb64a::f0 bia_undef::undef "
        "dst_u8::blocked:acdb::f0,attr-scratchpad:user attr-post-ops:eltwise_relu ,"
        "alg:convolution_direct,mb2_ic3oc96,0.0419922",
        ("convolution", "brgconv:avx512_core_amx_int8", "int8", "mb2_ic3oc96", 0.0419922),
    ),
    "oneDNN 3.12 with timestamps and creation": (
        "onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)\n"
        "onednn_verbose,v1,info,cpu,isa:Intel AVX-512 with Intel DL Boost and bfloat16 support\n"
        "onednn_verbose,v1,primitive,info,template:timestamp,operation,engine,primitive,"
        "implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time\n"
        "onednn_verbose,v1,graph,info,template:timestamp,operation,engine,partition_id,backend\n"
        "onednn_verbose,v1,1795439925521.875000,primitive,create:dispatch,convolution,"
        "unsupported feature for padding: f,t,l padding not supported,src/cpu/conv.cpp:1331\n"
        "onednn_verbose,v1,1795439921049.301025,primitive,create:cache_hit,cpu,reorder,jit:uni,"
        "undef,src:f32::blocked:abcd::f0 dst:f32::blocked:Acdb16a::f0,,,16x3x3x3,0.000976562\n"
        "onednn_verbose,v1,1795439923267.165039,primitive,exec:check,primitive,unused argument\n"
        "onednn_verbose,v1,1795439923268.1,graph,exec,cpu,100002,sdp,matmul,,in0_f16,strict,,"
        "dnnl_backend,7.5\n"
        "onednn_verbose,v1,1795439918548.923096,primitive,exec,cpu,convolution,"
        "jit_bf16:avx512_core_bf16,forward_training,src:bf16:a:blocked:abcd::f0 "
        "wei:bf16:ap:blocked:AcdB16a2b::f0 bia:undef::undef::: dst:bf16:a:blocked:aBcd16b::f0,"
        "attr-scratchpad:user,alg:convolution_direct,mb4_ic3oc16,0.0788574",
        ("convolution", "jit_bf16:avx512_core_bf16", "bf16", "mb4_ic3oc16", 0.0788574),
    ),
    "gemm_api of oneDNN 3.7": (
        "onednn_verbose,v1,primitive,exec,cpu,gemm_api,,undef,src_f32::blocked:ba:f0 "
        "wei_f32::blocked:ab:f0 dst_f32::blocked:ab:f0,,,1024x64:64x10,0.187012",
        ("gemm_api", "", "fp32", "1024x64:64x10", 0.187012),
    ),
}
HEADER = "onednn_verbose,v1,info,cpu,isa:{}"
LINE = (
    "onednn_verbose,v1,primitive,exec,cpu,convolution,{},backward_data,src:{}::blocked:acdb::f0 "
    "wei:{}:a:blocked:Adcb16a::f0,attr-post-ops:eltwise_relu,alg:convolution_direct,mb4_ic3,{}"
)


def line(kernel="brg_conv_fwd:avx2", dtype="f32", milliseconds="0.25"):
    return LINE.format(kernel, dtype, dtype, milliseconds)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_read(version):
    text, expected = VERSIONS[version]
    log = read_kernel_log(text.splitlines())
    (call,) = log.calls
    actual = call.primitive, call.implementation, call.precision, call.problem, call.milliseconds
    assert actual == expected
    assert log.malformed == 0
    assert log.total == expected[-1]


def test_the_instructions_of_the_cpu_are_told_whole():
    texts = {version: text.splitlines() for version, (text, _) in VERSIONS.items()}
    assert read_kernel_log(texts["MKL-DNN 0.20"]).isa.endswith(
        "(Intel(R) AVX-512) with AVX512BW, AVX512VL, and AVX512DQ extensions"
    )
    assert read_kernel_log(texts["DNNL 1.4"]).isa == "Intel AVX2"
    assert "AMX with bfloat16" in read_kernel_log(texts["oneDNN 3.1"]).isa
    newest = read_kernel_log(texts["oneDNN 3.12 with timestamps and creation"])
    assert newest.library == "oneDNN v3.12.0 (commit 80afa71)"


@pytest.mark.parametrize(
    ("kernel", "isa"),
    [
        ("brg_conv_fwd:avx512_core_bf16", "avx512_core_bf16"),
        ("brg_conv_bwd:avx2+brg_conv_fwd:avx2", "avx2"),
        ("brg_matmul:avx10_1_512_amx", "avx10_1_512_amx"),
        ("jit:sve_256", "sve_256"),
        ("jit:uni", ""),
        ("x64:gemm:jit", ""),
    ],
)
def test_the_instructions_of_a_kernel_are_read_from_its_name(kernel, isa):
    assert read_kernel_log([line(kernel)]).calls[0].isa == isa


def test_types_stand_beside_their_tensors():
    (call,) = read_kernel_log([line(dtype="u8")]).calls
    assert call.dtypes == {"src": "u8", "wei": "u8"}
    assert call.prop_kind == "backward_data"


def test_a_field_that_a_later_version_adds_is_found_by_the_template():
    template = (
        "onednn_verbose,v2,primitive,info,template:operation,engine,stream,primitive,"
        "implementation,prop_kind,memory_descriptors,attributes,auxiliary,problem_desc,exec_time"
    )
    later = line().replace("v1", "v2").replace("exec,cpu,", "exec,cpu,stream:0,")
    assert read_kernel_log([later.replace("stream:0,", ""), line()]).malformed == 0
    (call,) = read_kernel_log([template, later]).calls
    assert (call.primitive, call.milliseconds) == ("convolution", 0.25)


class TestTornLines:
    def test_a_line_behind_a_progress_bar_is_read(self):
        log = read_kernel_log([f"\x1b[1m 1/10\x1b[0m ━━━ 10s 1s/step - loss: 2.3244{line()}\n"])
        assert (len(log.calls), log.malformed) == (1, 0)

    def test_two_whole_lines_in_one_are_two(self):
        log = read_kernel_log([line(milliseconds="0.5") + line(milliseconds="0.25")])
        assert log.total == 0.75
        assert log.malformed == 0

    @pytest.mark.parametrize("cut", range(16, len(line()) - len("0.25"), 7))
    def test_a_line_that_another_one_cuts_off_is_counted(self, cut):
        log = read_kernel_log([line()[:cut] + line("jit:avx2"), line()[cut:]])
        assert [call.implementation for call in log.calls] == ["jit:avx2"]
        assert log.malformed == 1
        assert "1 unreadable line not counted" in log.notes[0]

    @pytest.mark.parametrize("tail", ["0.25 2/10 ━━", "0.2x5", "", "nan", "-1"])
    def test_what_is_no_number_of_milliseconds_is_not_taken_for_one(self, tail):
        log = read_kernel_log([line(milliseconds=tail), line()])
        assert (len(log.calls), log.malformed) == (1, 1)

    def test_a_size_at_the_end_of_a_cut_line_is_not_taken_for_the_time(self):
        whole = VERSIONS["DNNL 1.4"][0].splitlines()[1].replace("mb1_ic256oc64", "256")
        log = read_kernel_log([whole.rpartition(",")[0], whole])
        assert [call.milliseconds for call in log.calls] == [1e-05]
        assert log.malformed == 1


class TestRows:
    LOG = (line("brg:avx2", "f32", "3"), line("brg:avx2", "u8", "1"), line("jit:uni", "f32", "4"))
    UNNAMED = VERSIONS["gemm_api of oneDNN 3.7"][0].replace("0.187012", "24")

    def rows(self, key):
        log = read_kernel_log([*self.LOG, self.UNNAMED])
        return [(row.name, row.calls, row.milliseconds, row.share) for row in log.by(key)]

    def test_calls_are_put_together_and_sorted_by_time(self):
        unnamed = ("gemm_api", 1, 24, 0.75)
        rows = [unnamed, ("brg:avx2", 2, 4, 0.125), ("jit:uni", 1, 4, 0.125)]
        assert self.rows("implementation") == rows
        assert self.rows("primitive") == [unnamed, ("convolution", 3, 8, 0.25)]
        assert self.rows("isa") == [("unnamed", 2, 28, 0.875), ("avx2", 2, 4, 0.125)]
        assert self.rows("precision") == [("fp32", 3, 31, 31 / 32), ("int8", 1, 1, 1 / 32)]
        assert [name for name, *_ in self.rows("problem")] == [
            "gemm_api 1024x64:64x10",
            "convolution backward_data mb4_ic3",
        ]

    def test_another_key_is_a_mistake(self):
        with pytest.raises(ConfigurationError, match="did you mean 'primitive'"):
            self.rows("primitiv")


class TestNotes:
    def test_of_a_cpu_without_bf16_it_is_said_that_no_kernel_ran_in_it(self):
        log = read_kernel_log([HEADER.format("Intel AVX2"), line()])
        assert log.notes == ("this CPU has no BF16 (Intel AVX2): no kernel ran in BF16",)

    def test_of_a_cpu_without_bf16_it_is_said_what_was_emulated(self):
        isa = "Intel AVX-512 with AVX512BW, AVX512VL, and AVX512DQ extensions"
        log = read_kernel_log([HEADER.format(isa), line(), line("jit:avx512_core", "bf16")])
        assert "1 call emulated BF16" in log.notes[0]

    def test_of_a_cpu_with_bf16_nothing_is_said(self):
        isa = "Intel AVX-512 with Intel DL Boost and bfloat16 support"
        assert read_kernel_log([HEADER.format(isa), line()]).notes == ()

    def test_a_log_of_nothing_but_products_says_that_onednn_is_off(self):
        log = read_kernel_log([VERSIONS["gemm_api of oneDNN 3.7"][0]])
        assert "TF_ENABLE_ONEDNN_OPTS=1" in log.notes[0]


class TestEmptyLogs:
    @pytest.mark.parametrize(
        ("lines", "why"),
        [
            ([], "run the program with ONEDNN_VERBOSE=1"),
            (["epoch 1\n", "loss 0.3\n"], "TF_ENABLE_ONEDNN_OPTS=1"),
            ([HEADER.format("Intel AVX2")], "oneDNN was loaded, but ran no kernels"),
            ([line().replace("exec,", "create:cache_miss,")], "lists created kernels"),
            ([line()[:90], line()[:80]], "none of 2 oneDNN lines is readable"),
            (["[]"], "end_profiling"),
        ],
    )
    def test_an_empty_log_says_why(self, lines, why):
        with pytest.raises(KernelLogError, match=why):
            read_kernel_log(lines)

    def test_a_file_that_is_not_there_is_named(self, tmp_path):
        with pytest.raises(KernelLogError, match=r"nothing\.log"):
            read_kernel_log(tmp_path / "nothing.log")

    def test_json_of_something_else_is_no_profile(self, tmp_path):
        (tmp_path / "report.json").write_text('{"met": true}')
        with pytest.raises(KernelLogError, match="must contain a list of events"):
            read_kernel_log(tmp_path / "report.json")
        (tmp_path / "report.json").write_text('[{"met": tr')
        with pytest.raises(KernelLogError, match="not valid JSON"):
            read_kernel_log(tmp_path / "report.json")

    def test_a_log_may_begin_with_a_bracket(self, tmp_path):
        (tmp_path / "run.log").write_text(f"[INFO] begin\n{line()}\n", encoding="utf-8")
        assert len(read_kernel_log(tmp_path / "run.log").calls) == 1


def test_a_profile_of_onnx_runtime_is_read():
    def event(name, op, microseconds, *types, **more):
        shapes = [{kind: [2, 3]} for kind in types]
        details = {"op_name": op, "provider": "CPUExecutionProvider", "input_type_shape": shapes}
        return {"cat": "Node", "dur": microseconds, "name": name, "args": details | more}

    events = [
        {"cat": "Session", "dur": 900, "name": "model_run", "args": {}},
        event("conv_fence_before", "QLinearConv", 7),
        event("conv_kernel_time", "QLinearConv", 1500, "uint8", "float", "uint8", "int8"),
        event("conv_fence_after", "QLinearConv", 7),
        event("branch_kernel_time", "If", 600, "bool"),
        event("gemm_kernel_time", "Gemm", 500, "float", "float"),
        {"cat": "Node", "name": "odd_kernel_time", "args": {}},
    ]
    log = read_kernel_log([json.dumps(events)])
    assert log.total == 2
    assert log.malformed == 1
    rows = [(row.name, row.milliseconds) for row in log.by("implementation")]
    assert rows == [("QLinearConv:CPU", 1.5), ("Gemm:CPU", 0.5)]
    assert [row.name for row in log.by("precision")] == ["int8", "fp32"]
    assert log.calls[1].problem == "2x3:2x3"


class TestTwoLogs:
    BEFORE = read_kernel_log(
        [
            line("brg_conv_fwd:avx512_core", "f32", "3"),
            line("brg_conv_fwd:avx512_core", "f32", "1").replace("mb4_ic3", "mb8_ic3"),
            line("jit:avx2", "f32", "5").replace("backward_data", "forward_training"),
            VERSIONS["gemm_api of oneDNN 3.7"][0],
        ]
    )
    AFTER = read_kernel_log(
        [
            line("brg_conv_fwd:avx512_core_bf16", "bf16", "1"),
            line("brg_conv_fwd:avx512_core_bf16", "bf16", "1").replace("mb4_ic3", "mb8_ic3"),
            line("jit:avx2", "f32", "4").replace("backward_data", "forward_inference"),
            VERSIONS["gemm_api of oneDNN 3.7"][0]
            .replace("gemm_api,", "matmul,brg_matmul:avx512_core_bf16")
            .replace("f32", "bf16"),
        ]
    )

    def test_work_that_other_kernels_do_is_found_with_its_time(self):
        first, second = changed_kernels(self.BEFORE, self.AFTER)
        assert first.work == "convolution backward_data"
        assert first.before == ("brg_conv_fwd:avx512_core fp32",)
        assert first.after == ("brg_conv_fwd:avx512_core_bf16 bf16",)
        assert (first.problems, first.calls_before, first.calls_after) == (2, 2, 2)
        assert (first.milliseconds_before, first.milliseconds_after) == (4, 2)
        assert second.before == ("gemm_api fp32",)
        assert second.after == ("brg_matmul:avx512_core_bf16 bf16",)

    def test_a_dense_layer_and_a_product_of_its_sizes_are_the_same_work(self):
        product = VERSIONS["gemm_api of oneDNN 3.7"][0]
        dense = line("brgemm:avx2").replace("convolution,", "inner_product,")
        dense = dense.replace("backward_data", "forward_training").replace("mb4_ic3", "{}")
        logs = [read_kernel_log([text]) for text in (product, dense.format("mb1024ic64oc10"))]
        (change,) = changed_kernels(*logs)
        assert (change.before, change.after) == (("gemm_api fp32",), ("brgemm:avx2 fp32",))
        smaller = read_kernel_log([dense.format("mb512ic64oc10")])
        assert len(changed_kernels(logs[0], smaller)) == 2

    def test_the_same_log_twice_has_no_changes(self):
        assert changed_kernels(self.BEFORE, self.BEFORE) == []

    def test_rows_stand_beside_each_other_by_name(self):
        pairs = {pair.name: pair for pair in side_by_side(self.BEFORE, self.AFTER, "isa")}
        assert pairs["avx2"].before.milliseconds == 5
        assert pairs["avx2"].after.milliseconds == 4
        assert pairs["avx512_core"].after is None
        assert pairs["avx512_core_bf16"].before is None


@pytest.mark.parametrize("size", [1, 3, 20, 4096])
def test_a_sieve_gives_back_every_byte_that_is_not_of_the_log(size):
    texts = ["epoch 1\n", "bar 1/10 one", "two\r\n", "no onednn_verbose here\n", "half onednn_"]
    stream = "".join(
        [texts[0], texts[1], line(), "\n", texts[2], line("jit:avx2"), "\n", *texts[3:]]
    ).encode()
    lines = []
    sieve = Sieve(lines.append)
    parts = [sieve.pass_through(stream[at : at + size]) for at in range(0, len(stream), size)]
    assert b"".join([*parts, sieve.ended()]).decode() == "".join(texts)
    assert lines == [line(), line("jit:avx2")]


def test_what_cannot_be_of_the_log_passes_a_sieve_at_once():
    sieve = Sieve([].append)
    assert sieve.pass_through(b"Password: ") == b"Password: "
    assert sieve.pass_through(b"loss o") == b"loss "
    assert sieve.pass_through(b"f 3") == b"of 3"


def test_without_standard_output_there_is_nothing_to_catch():
    code = (
        "from neural_mp.profiling.kernel_log import sieve_standard_output\n"
        "with sieve_standard_output(None):\n"
        "    pass"
    )
    command = f"exec '{sys.executable}' -c '{code}' >&-"
    done = subprocess.run(command, shell=True, stderr=subprocess.PIPE, text=True, check=False)
    assert "KernelLogError: standard output is closed" in done.stderr
