"""Kernels of LiteRT, asked of the quantizer and the runtime."""

from litert_kernel_nets import make_float_file, make_int8_file

from neural_mp.adaptors.litert import capabilities
from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError
from neural_mp.testing import machine

ADAPTOR = LiteRtAdaptor()


def test_an_op_that_the_quantizer_refuses_costs_no_other_op_int8(net, monkeypatch):
    model = ADAPTOR.load(net)
    names = [op.name for op in ADAPTOR.graph(model) if op.type == "CONV_2D"]
    quantize, refused = capabilities.quantize_program, names[2]

    def refuse_one(program, recipe):
        scopes = str(recipe.entries)
        if refused.replace("/", "") in scopes.replace("\\", "").replace("/", ""):
            raise ConversionError("this op is refused")
        return quantize(program, recipe)

    monkeypatch.setattr(capabilities, "quantize_program", refuse_one)
    space = ADAPTOR.space(model, machine())
    in_int8 = [name for name in names if Precision.INT8 in space.capabilities[name].precisions]
    assert set(names) - set(in_int8) == {refused}
    assert space.capabilities[refused].reasons[Precision.INT8] == "this op is refused"


def test_ops_that_call_graphs_or_are_quantized_have_their_own_reasons():
    reasons = {}
    for content in (make_float_file("loops"), make_int8_file("silu")):
        model = ADAPTOR.load(content)
        space = ADAPTOR.space(model, machine())
        for op in (op for op in space.graph if op.name in model.structure.ops):
            reasons[op.type] = space.capabilities[op.name].reasons.get(Precision.INT8)
    assert reasons["WHILE"] == "only the main graph is converted, not loops and branches"
    assert reasons["CONV_2D"] == "it is quantized already; give the float file"
