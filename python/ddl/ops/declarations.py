"""The operators' declarations: names and types of arguments, names of outputs.

Schema, fake implementation and autograd follow from them by name. Native code lists the same names
in src/torch/operators.rs; tests/ops/test_declarations.py compares the two.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

# `erase` is a place in `ddl.results.ERASE`.
REWRITE = "Tensor direction, Tensor value, Tensor gate, float eps_k, int erase"
READ = (
    "Tensor? compress, Tensor? norm_weight, float? norm_eps, Tensor? gate_weight, "
    "Tensor? gate_bias, Tensor? value_weight, Tensor? value_bias, float? value_scale, "
    "bool value_from_compressed"
)
# Gradients of the read's outputs; None for zero.
READ_INCOMING = "Tensor? grad_context, Tensor? grad_new_value, Tensor? grad_new_gate"
# Outputs that the read's backward uses; an absent one is an empty tensor.
READ_SAVED = "Tensor new_value, Tensor new_gate, Tensor compressed, Tensor rstd"
# How the backward gets a state that is not saved: it applies the rewrites of the chain (direction,
# value, gate and stats of each, without gradients of their own) to the anchor. Without an anchor
# the state is saved.
ANCHORED = "Tensor? anchor, Tensor[]? chain"
# Where a sequence holds several documents: their first tokens, (…, T) bool. Nothing that looks back
# in time looks beyond one.
DOCUMENTS = "Tensor? document_starts"
READ_PARAMETERS = "compress norm_weight gate_weight gate_bias value_weight value_bias"


class Operator:
    """An operator: `torch.ops.ddl.<name>(arguments) -> outputs`.

    declared: the arguments' schemas, in order. names: their names.
    tensors, optional, lists: names of those that are tensors, that may be None, that are lists of
    tensors. Arguments: the type of a call's arguments by name. outputs: names, in order.
    """

    def __init__(self, name: str, arguments: str, outputs: str) -> None:
        self.name, self.declared = name, arguments.split(", ")
        pairs = [argument.split(" ") for argument in self.declared]
        self.names = [argument for _, argument in pairs]
        self.lists = [argument for kind, argument in pairs if kind.startswith("Tensor[]")]
        self.tensors = [
            argument
            for kind, argument in pairs
            if kind.startswith("Tensor") and argument not in self.lists
        ]
        self.optional = [argument for kind, argument in pairs if kind.endswith("?")]
        self.outputs = outputs.split(" ")
        make: Any = namedtuple  # mypy knows only literal fields
        self.Arguments = make("Arguments", self.names)

    @property
    def schema(self) -> str:
        returns = ", ".join(f"Tensor {output}" for output in self.outputs)
        returns = "Tensor" if len(self.outputs) == 1 else f"({returns})"
        return f"{self.name}({', '.join(self.declared)}) -> {returns}"


def _gradients(names: str) -> str:
    return " ".join(f"grad_{name}" for name in names.split(" "))


rewrite = Operator("rewrite", f"Tensor state, {REWRITE}", "new_state stats")
read = Operator(
    "read",
    f"Tensor state, {READ}, ScalarType? context_dtype, {DOCUMENTS}",
    "context new_value new_gate compressed rstd",
)
rewrite_read = Operator(
    "rewrite_read",
    f"Tensor state, {REWRITE}, {READ}, ScalarType? context_dtype, {ANCHORED}, {DOCUMENTS}",
    "new_state stats context new_value new_gate compressed rstd",
)
expand = Operator("expand", f"Tensor x, Tensor? weight, int value_channels, {DOCUMENTS}", "state")
# A step of a sequence in pieces, for inference. Nothing is saved for a backward. `pending` is what
# the tokens before these add to the compressed x of the first K − 1 (…, K − 1, d), `new_pending`
# what these leave for the next; absent for a read within a token.
cached_read = Operator(
    "cached_read",
    f"Tensor state, {READ}, ScalarType? context_dtype, Tensor? pending, {DOCUMENTS}",
    "context new_value new_gate new_pending",
)
cached_rewrite_read = Operator(
    "cached_rewrite_read",
    f"Tensor state, {REWRITE}, {READ}, ScalarType? context_dtype, Tensor? pending, {DOCUMENTS}",
    "new_state context new_value new_gate new_pending",
)
# `before` is x of the K − 1 tokens before these (…, K − 1, d), `new_before` the next call's.
cached_expand = Operator(
    "cached_expand",
    f"Tensor x, Tensor? weight, int value_channels, Tensor? before, {DOCUMENTS}",
    "state new_before",
)

# `wanted` has a bit for each gradient, in the order of the outputs. Gradients of parameters are
# computed only if theirs is set, and are empty otherwise.
rewrite_backward = Operator(
    "rewrite_backward",
    f"Tensor grad_new_state, Tensor state, {REWRITE}, Tensor stats",
    _gradients("state direction value gate"),
)
read_backward = Operator(
    "read_backward",
    f"{READ_INCOMING}, Tensor state, {READ}, {READ_SAVED}, {DOCUMENTS}, int wanted",
    _gradients(f"state {READ_PARAMETERS}"),
)
rewrite_read_backward = Operator(
    "rewrite_read_backward",
    f"Tensor? grad_new_state, {READ_INCOMING}, Tensor state, {REWRITE}, {READ}, Tensor stats, "
    f"{READ_SAVED}, Tensor[] chain, {DOCUMENTS}, int wanted",
    _gradients(f"state direction value gate {READ_PARAMETERS}"),
)
# Overwrites grad_new_state with the gradient of the state. `wanted` has the bits of
# rewrite_read_backward, the state's first.
overwriting_backward = Operator(
    "rewrite_read_backward_",
    f"Tensor(a!) grad_new_state, {READ_INCOMING}, Tensor state, {REWRITE}, {READ}, Tensor stats, "
    f"{READ_SAVED}, Tensor[] chain, {DOCUMENTS}, int wanted",
    _gradients(f"direction value gate {READ_PARAMETERS}"),
)
expand_backward = Operator(
    "expand_backward",
    "Tensor grad_state, Tensor x, Tensor? weight, Tensor? document_starts, int wanted",
    _gradients("x weight"),
)
# The delta rule over time. If it `saves`, it returns what the backward needs: v − kᵀS of every step
# and the state before every chunk of tokens.
DELTA_RULE = (
    "Tensor q, Tensor k, Tensor v, Tensor beta, Tensor? g, float? scale, Tensor? initial_state, "
    "Tensor? document_starts"
)
delta_rule = Operator("delta_rule", f"{DELTA_RULE}, bool saves", "y final_state errors states")
delta_rule_backward = Operator(
    "delta_rule_backward",
    f"Tensor? grad_y, Tensor? grad_final_state, {DELTA_RULE}, Tensor errors, Tensor states",
    _gradients("q k v beta g initial_state"),
)

BACKWARDS: Sequence[tuple[Operator, Operator]] = (
    (rewrite, rewrite_backward),
    (read, read_backward),
    (rewrite_read, rewrite_read_backward),
    (expand, expand_backward),
    (delta_rule, delta_rule_backward),
)
CACHED = (cached_read, cached_rewrite_read, cached_expand)
OPERATORS = (*(operator for pair in BACKWARDS for operator in pair), overwriting_backward, *CACHED)
ON_CPUS_ALONE = (overwriting_backward, delta_rule, delta_rule_backward)
