"""What an attacker writes into the text of an exported program, at each place that is read as code.

An edit takes the program and a Python expression that makes a file, and changes the program; what
it returns, if anything, stands in the file instead.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

Edit = Callable[[dict[str, Any], str], Any]
_HOSTILE_MODULE = "this"


def _graph(program: dict[str, Any]) -> dict[str, Any]:
    graph: dict[str, Any] = program["graph_module"]["graph"]
    return graph


def _size(program: dict[str, Any], expression: str, tensor: str = "x") -> None:
    meta = _graph(program)["tensor_values"][tensor]
    meta["sizes"][0] = {"as_expr": {"expr_str": expression, "hint": {"as_int": 4}}}


def in_size(program: dict[str, Any], code: str) -> None:
    """The length of an axis of an input."""
    _size(program, code)


def in_stride(program: dict[str, Any], code: str) -> None:
    """The stride of an axis of an input."""
    _graph(program)["tensor_values"]["x"]["strides"][0] = {"as_expr": {"expr_str": code}}


def in_symbolic_int(program: dict[str, Any], code: str) -> None:
    """A size that an op works with."""
    values = _graph(program)["sym_int_values"]
    for value in values.values():
        value["as_expr"]["expr_str"] = code
    assert values


def in_symbolic_kinds(kind: str) -> Edit:
    """A truth or fraction that an input of its own stands for."""

    def edit(program: dict[str, Any], code: str) -> None:
        graph, argument = _graph(program), {f"as_sym_{kind}": {"as_name": "evil"}}
        graph[f"sym_{kind}_values"]["evil"] = {"as_expr": {"expr_str": code}}
        graph["nodes"].insert(
            0,
            {
                "target": "torch.sym_not" if kind == "bool" else "torch.sym_float",
                "inputs": [{"name": "", "arg": {"as_bool": True}, "kind": 1}],
                "outputs": [argument],
                "metadata": {},
            },
        )

    return edit


def in_layers_of_a_symbol(program: dict[str, Any], code: str) -> None:
    """The name of a symbol, which is read again as an expression."""
    _size(program, f"Symbol({code!r}, positive=True, integer=True)")


def in_a_function(program: dict[str, Any], code: str) -> None:
    """An argument of a function that sizes may call."""
    _size(program, f"Max(1, Symbol('s0'), {code})")


def in_a_call_of_a_class(program: dict[str, Any], code: str) -> None:
    """A way to builtins that names nothing that is forbidden."""
    _size(program, f"Symbol.__init__.__globals__['__builtins__']['eval']({code!r})")


def in_range_constraint(program: dict[str, Any], code: str) -> None:
    """The symbol that a range is given for."""
    program["range_constraints"][code] = {"min_val": 2, "max_val": 64}


def power_of_powers(program: dict[str, Any], code: str) -> None:
    """A number that no machine can hold."""
    _size(program, "2**2**2**99")


def power_of_an_open_size(program: dict[str, Any], code: str) -> None:
    """The same, by way of what a size is expected to be."""
    _size(program, "LShift(Integer(1), Integer(10000000000))")


def symbols_without_end(program: dict[str, Any], code: str) -> None:
    """A symbol whose number is counted up to."""
    program["range_constraints"]["u99999999999"] = {"min_val": 0, "max_val": 9}


def deep_expression(program: dict[str, Any], code: str) -> None:
    """Parentheses that overflow a parser's stack."""
    _size(program, "(" * 100_000 + "s0" + ")" * 100_000)


def huge_integer(program: dict[str, Any], code: str) -> str:
    """A number of a million digits."""
    _size(program, "HERE")
    return json.dumps(program).replace(
        '"hint": {"as_int": 4}', f'"hint": {{"as_int": {"9" * 10**6}}}'
    )


def deep_text(program: dict[str, Any], code: str) -> str:
    """A text whose lists overflow a parser's stack."""
    return "[" * 10**6 + "]" * 10**6


def _linear(program: dict[str, Any]) -> dict[str, Any]:
    return next(n for n in _graph(program)["nodes"] if "linear" in n["target"])


def _target(target: str, *arguments: dict[str, Any]) -> Edit:
    """The first op is a call of something else."""

    def edit(program: dict[str, Any], code: str) -> None:
        program["verifiers"] = []
        values = json.loads(
            json.dumps(arguments).replace("SHELL", f'{sys.executable} -c \\"{code}\\"')
        )
        node = _linear(program)
        node["target"] = target
        node["inputs"] = [{"name": "", "arg": value, "kind": 1} for value in values]

    return edit


def operator_as_argument(program: dict[str, Any], code: str) -> None:
    """A function that an op is given."""
    _linear(program)["inputs"][0]["arg"] = {"as_operator": "torch.os.system"}


def name_of_an_input(program: dict[str, Any], code: str) -> str:
    """A name that stands in code which is run."""
    return json.dumps(program).replace('"x"', json.dumps(f"x={code}"))


def name_of_a_node(program: dict[str, Any], code: str) -> str:
    """The same, of what an op gives."""
    return json.dumps(program).replace('"linear"', json.dumps(f"linear = {code}; y"))


def name_of_a_parameter(program: dict[str, Any], code: str) -> str:
    """The same, of a weight."""
    hostile = json.dumps(f'layer.a", {code}, "b')
    return json.dumps(program).replace('"layer.weight"', hostile)


def name_of_an_argument(program: dict[str, Any], code: str) -> None:
    """The same, of a parameter of the model's call."""
    for call in program["graph_module"]["module_call_graph"]:
        if call.get("signature"):
            call["signature"]["forward_arg_names"] = [f"x={code}"]


def guard(program: dict[str, Any], code: str) -> None:
    """A condition that the inputs must meet, which is code."""
    program["guards_code"] = [f"{code} or True"]


def trace_of_the_source(program: dict[str, Any], code: str) -> None:
    """Where an op comes from, which stands as a comment in code."""
    for node in _graph(program)["nodes"]:
        node["metadata"]["stack_trace"] = f'File "x", line 1, in forward\n  y\n{code}\n'
        node["metadata"]["source_fn_stack"] = "a,torch.os.system"
        node["metadata"]["nn_module_stack"] = f"a,b,c\n{code}"


def _nesting(tree: Callable[[dict[str, Any]], None]) -> Edit:
    def edit(program: dict[str, Any], code: str) -> None:
        for call in program["graph_module"]["module_call_graph"]:
            if call.get("signature"):
                version, spec = json.loads(call["signature"]["out_spec"])
                tree(spec)
                call["signature"]["out_spec"] = json.dumps([version, spec])

    return edit


def _enumerated(spec: dict[str, Any]) -> None:
    key = {"__enum__": True, "fqn": f"{_HOSTILE_MODULE}:s", "name": "x"}
    spec["context"] = json.dumps([key, "scores"])


def _default_dict(spec: dict[str, Any]) -> None:
    spec["type"] = "collections.defaultdict"
    spec["context"] = {
        "default_factory_module": _HOSTILE_MODULE,
        "default_factory_name": "s",
        "dict_context": ["best", "scores"],
    }


def _class(spec: dict[str, Any]) -> None:
    spec["type"] = "subprocess.Popen"


def _deep(spec: dict[str, Any]) -> None:
    leaf = dict(spec["children_spec"][0])
    for _ in range(400):
        leaf = {"type": "builtins.tuple", "context": "null", "children_spec": [leaf]}
    spec["children_spec"][0] = leaf


#: What is written → how.
PROGRAMS: dict[str, Edit] = {
    "expression in a size": in_size,
    "expression in a stride": in_stride,
    "expression in a symbolic int": in_symbolic_int,
    "expression in a symbolic bool": in_symbolic_kinds("bool"),
    "expression in a symbolic float": in_symbolic_kinds("float"),
    "expression in a symbol's name": in_layers_of_a_symbol,
    "expression in a function": in_a_function,
    "expression by way of a class": in_a_call_of_a_class,
    "expression in a range": in_range_constraint,
    "power of powers": power_of_powers,
    "shift without end": power_of_an_open_size,
    "symbols without end": symbols_without_end,
    "deep expression": deep_expression,
    "huge integer": huge_integer,
    "deep text": deep_text,
    "op that is a shell command": _target("torch.os.system", {"as_string": "SHELL"}),
    "op that evaluates": _target("torch.sys.modules.get", {"as_string": "os"}),
    "op that loads a file": _target("torch.load", {"as_string": "evil.pt"}),
    "op that writes a file": _target(
        "torch.ops.aten.save.default", {"as_int": 1}, {"as_string": "evil"}
    ),
    "op that maps a file": _target(
        "torch.ops.aten.from_file.default",
        {"as_string": "/etc/passwd"},
        {"as_bool": False},
        {"as_int": 4},
    ),
    "op that calls a method": _target("_operator.methodcaller", {"as_string": "tofile"}),
    "op out of private parts": _target("torch.ops.aten.__class__.__init__", {"as_int": 1}),
    "op of a compiled kernel": _target(
        "torch.ops.higher_order.triton_kernel_wrapper_functional", {"as_int": 1}
    ),
    "operator as argument": operator_as_argument,
    "code in an input's name": name_of_an_input,
    "code in a node's name": name_of_a_node,
    "code in a parameter's name": name_of_a_parameter,
    "code in an argument's name": name_of_an_argument,
    "code in a guard": guard,
    "code in a trace": trace_of_the_source,
    "nesting that names an enumeration": _nesting(_enumerated),
    "nesting that imports a module": _nesting(_default_dict),
    "nesting that names a class": _nesting(_class),
    "deep nesting": _nesting(_deep),
}
