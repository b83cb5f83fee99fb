"""Captured graphs name no source lines of the user's code, where PyTorch can leave them out."""

import pytest
import torch
from torch import fx, nn

from neural_mp.adaptors.pytorch.capture.graph_capture import export_program
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs


def test_an_export_names_no_source_lines_and_restores_the_option():
    if not hasattr(getattr(fx, "config", None), "do_not_emit_stack_traces"):
        pytest.skip("this PyTorch always looks up source lines")
    original = fx.config.do_not_emit_stack_traces
    program = export_program(nn.Linear(4, 4), CallArgs((torch.ones(2, 4),)), "all")
    assert not [node for node in program.graph.nodes if node.meta.get("stack_trace")]
    assert fx.config.do_not_emit_stack_traces is original
