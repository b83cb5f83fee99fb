"""Kernels of LiteRT, asked of the quantizer and the runtime."""

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
