"""The operators' declarations: names and types of arguments, names of outputs.

Schema, fake implementation, autograd and the backward's own schema follow from them by name. Native
code decodes calls by these schemas, and src/torch/operators.rs takes the arguments by their names.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any


class Operator:
    """An operator: `torch.ops.ddl.<name>(arguments) -> outputs`.

    declared: the arguments' schemas, in order. kinds: their types by name. Arguments: the type of a
    call's arguments by name. outputs: names, in order; None takes the place of an absent one.
    on_cpus_alone: GPUs have no kernel. call: calls it in Python, with positional arguments.
    """

    call: Callable[..., Any]
    on_cpus_alone = False

    def __init__(self, name: str, arguments: str, outputs: str) -> None:
        self.name, self.declared = name, arguments.split(", ")
        self.kinds = {word: kind for kind, word in map(str.split, self.declared)}
        self.names, self.outputs = list(self.kinds), outputs.split(" ")
        make: Any = namedtuple  # mypy knows only literal fields
        self.Arguments = make("Arguments", self.names)

    def schema(self, overload: str = "") -> str:
        """The schema of the overload `default`, or of another one."""
        returns = ", ".join(f"Tensor {output}" for output in self.outputs)
        name = f"{self.name}.{overload}" if overload else self.name
        return f"{name}({', '.join(self.declared)}) -> ({returns})"


class Forward(Operator):
    """An operator that has a derivative, and its backward.

    inputs: the arguments that have gradients. passed: those that the backward gets, too. rest:
    those of the forward alone. results: the outputs that have gradients. saved: those that the
    backward gets. left: all others.

    The overload `kernel` is the same without a derivative, refused where gradients are recorded:
    autograd.py records them around it.
    """

    backward: Operator

    def __init__(
        self,
        name: str,
        inputs: str,
        passed: str = "",
        rest: str = "",
        *,
        results: str,
        saved: str = "",
        left: str = "",
    ) -> None:
        arguments = ", ".join(part for part in (inputs, passed, rest) if part)
        outputs = " ".join(dict.fromkeys(f"{results} {saved} {left}".split()))
        super().__init__(name, arguments, outputs)
        self.results, self.saved = results.split(), saved.split()
        self.inputs = [argument.split(" ")[1] for argument in inputs.split(", ")]
        self.passed = [argument.split(" ")[1] for argument in passed.split(", ") if argument]
        kind = "Tensor" if len(self.results) == 1 else "Tensor?"
        # `wanted` has a bit for each gradient, in order. Those of parameters are computed only if
        # theirs is set.
        self.backward = Operator(
            f"{name}_backward",
            ", ".join(
                [
                    *(f"{kind} grad_{result}" for result in self.results),
                    *self.declared[: len(self.inputs) + len(self.passed)],
                    *(f"Tensor? {output}" for output in self.saved),
                    "int wanted",
                ]
            ),
            " ".join(f"grad_{name}" for name in self.inputs),
        )


# `erase` is a place in `ddl.results.ERASE`.
WRITE, WRITE_NUMBERS = "Tensor direction, Tensor value, Tensor gate", "float eps_k, int erase"
READ = (
    "Tensor? compress, Tensor? norm_weight, Tensor? gate_weight, Tensor? gate_bias, "
    "Tensor? value_weight, Tensor? value_bias"
)
READ_NUMBERS = "float? norm_eps, float? value_scale, bool value_from_compressed"
# Where a sequence holds several documents: their first tokens, (…, T) bool. Nothing that looks back
# in time looks beyond one.
DOCUMENTS = "Tensor? document_starts"
# How the backward gets a state that is not saved: it applies the rewrites of the chain (direction,
# value, gate and stats of each, without gradients of their own) to the anchor. Without an anchor
# the state is saved.
CHAIN, ANCHOR = "Tensor[]? chain", "Tensor? anchor"
# A call that `saves` returns what its backward needs. One that does not is a step of a sequence in
# pieces: `pending` is what the tokens before these add to the compressed x of the first K − 1
# (…, K − 1, d), `new_pending` what these leave for the next; absent for a read within a token.
PIECES = "Tensor? pending, bool saves"
# `stats` (numbers,) has those of the rewrite for all tokens, then 1/rms of the read for all tokens.
READ_SAVED = "new_value new_gate stats compressed"

rewrite = Forward(
    "rewrite",
    f"Tensor state, {WRITE}",
    WRITE_NUMBERS,
    "bool saves",
    results="new_state",
    saved="stats",
)
read = Forward(
    "read",
    f"Tensor state, {READ}",
    f"{DOCUMENTS}, {READ_NUMBERS}",
    f"ScalarType? context_dtype, {PIECES}",
    results="context new_value new_gate",
    saved=READ_SAVED,
    left="new_pending",
)
rewrite_read = Forward(
    "rewrite_read",
    f"Tensor state, {WRITE}, {READ}",
    f"{DOCUMENTS}, {CHAIN}, {WRITE_NUMBERS}, {READ_NUMBERS}",
    f"ScalarType? context_dtype, {ANCHOR}, {PIECES}",
    results="new_state context new_value new_gate",
    saved=READ_SAVED,
    left="new_pending",
)
# `before` is x of the K − 1 tokens before these (…, K − 1, d), `new_before` the next call's.
expand = Forward(
    "expand",
    "Tensor x, Tensor? weight",
    f"{DOCUMENTS}, int value_channels",
    "Tensor? before, bool saves",
    results="state",
    left="new_before",
)
# The delta rule over time saves v − kᵀS of every step and the state before every chunk of tokens.
delta_rule = Forward(
    "delta_rule",
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, Tensor? initial_state",
    f"{DOCUMENTS}, float? scale",
    "bool saves",
    results="y final_state",
    saved="errors states",
)
# Overwrites grad_new_state with the gradient of the state. `wanted` has the bits of
# rewrite_read_backward, the state's first.
overwriting_backward = Operator(
    "rewrite_read_backward_",
    ", ".join(["Tensor(a!) grad_new_state", *rewrite_read.backward.declared[1:]]),
    " ".join(rewrite_read.backward.outputs[1:]),
)

FORWARDS = (rewrite, read, rewrite_read, expand, delta_rule)
OPERATORS = (*(part for each in FORWARDS for part in (each, each.backward)), overwriting_backward)
for _operator in (delta_rule, delta_rule.backward, overwriting_backward):
    _operator.on_cpus_alone = True
