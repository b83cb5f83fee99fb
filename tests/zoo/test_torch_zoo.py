"""Every module class of `torch.nn`, and what else a PyTorch model is made of, is converted."""

import inspect

import pytest
from torch import nn
from zoo import torch_constructs, torch_layers, torch_losses, torch_sequences
from zoo.harness import check_complete, check_page, convert

CASES = (
    *torch_layers.CASES,
    *torch_losses.CASES,
    *torch_sequences.CASES,
    *torch_constructs.CASES,
)

#: Class → why it has no case.
WITHOUT = {
    "Container": "a deprecated alias of Module that has no forward",
    "Module": "the base class: it has no forward",
    "RNNBase": "the base class of LSTM, GRU and RNN: it has no op of its own",
    "RNNCellBase": "the base class of the cells: it has no forward",
    "ParameterList": "covered by the case of ModuleList, as it has no forward",
    "ParameterDict": "covered by the case of ModuleList, as it has no forward",
    "ModuleDict": "covered by the case of ModuleList, as it has no forward",
}


def test_every_class_of_torch_nn_has_a_case():
    classes = [
        name
        for name, member in vars(nn).items()
        if inspect.isclass(member) and issubclass(member, nn.Module)
    ]
    check_complete(CASES, classes, WITHOUT)


def test_the_page_lists_every_case():
    check_page("torch", CASES)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "_"))
def test_a_module_runs_is_audited_and_reloads(case, tmp_path, record_row):
    record_row("torch", convert(case, tmp_path))
