"""nanochat's block with rewrites."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ddl import functional
from ddl.nn.checks import check_returned, require_exact_type
from ddl.nn.convolution import Slot
from ddl.nn.history import History
from ddl.nn.linear import form_parameters
from ddl.nn.read import Read
from ddl.nn.residual import DeltaResidual
from ddl.nn.stream import DeltaStream
from ddl.nn.trunk import boundary, opened
from ddl.ops.checks import autocast_dtype
from ddl.results import Write

from .state import State, history_of

BLOCK = ("attn", "mlp")  # every module in nanochat's Block
ADDED = ("read_attn", "read_mlp", "res_attn", "res_mlp", "expand", "readout")
NORM_EPS = torch.finfo(torch.float32).eps  # torch's default, in the type that it normalises in


class DeltaBlock(nn.Module):
    """nanochat's Block with a rewrite in place of each addition; it keeps attn and mlp.

        h = norm(read_attn(X));  X = res_attn(X, attn(h, …), context=h)
        h = norm(read_mlp(X));   X = res_mlp(X, mlp(h), context=h)

    The norm has no weight, as nanochat's. Reads and rewrites are fused as in DeltaStream: a state
    passes through memory once within a block, and once more between two, where the model's forward
    scales it. The first block opens the embeddings (B, T, d); the last one returns the raw final
    read (B, T, d), which the forward normalises.
    """

    def __init__(self, block: Any, number: int, stream: DeltaStream) -> None:
        super().__init__()
        self.attn, self.mlp = block.attn, block.mlp
        two = slice(2 * number, 2 * number + 2)
        self.read_attn, self.read_mlp = stream.reads[two]
        self.res_attn, self.res_mlp = stream.residuals[two]
        self.number = number
        self._ends = (stream.expand, stream.readout)  # in a tuple: of the first and last block
        self.expand = stream.expand if number == 0 else None
        self.readout = stream.readout if two.stop == len(stream.sublayers) else None
        self.train(block.training)

    def forward(self, x: Tensor | State, *args: Any, **kwargs: Any) -> Tensor | State:
        """Run one block: embeddings or a state in, another or the raw final read out.

        x: (B, T, d) for the first block, a State for the others. args, kwargs: of the attention;
        the last is nanochat's `kv_cache`.
        Raises TypeError if a block other than the first gets a tensor, or a read or residual is
        wrapped, or a cache without a history where tokens read others.
        """
        kv_cache = kwargs.get("kv_cache", args[-1] if args else None)
        history = history_of(kv_cache, self._looks_back())
        if isinstance(x, State):
            state = x.tensor()
        elif self.expand is None:
            raise TypeError(f"`x` must be what the block before returned, got {type(x).__name__}")
        else:
            if history is not None:
                history.begin(x.dtype)
            state = self._opened(x, history, "expand")
        write = self._sublayer("attn", state, None, history, *args, **kwargs)
        state = functional.write_to(*self._sublayer("mlp", *write, history))
        if self.readout is None:
            return State(
                state,
                lambda x: self._opened(x, history, f"{self.number}.mixed"),
                lambda state: self._read_out(state, history, f"{self.number}.readout"),
            )
        return self._read_out(state, history, "readout")

    def _sublayer(
        self,
        name: str,
        state: Tensor,
        write: Write | None,
        history: History | None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Write]:
        """Rewrite and read a state, and run attention or MLP: the new state, and what it writes."""
        read = require_exact_type(f"read_{name}", getattr(self, f"read_{name}"), Read)
        residual = require_exact_type(f"res_{name}", getattr(self, f"res_{name}"), DeltaResidual)
        form_parameters(read)
        found = read.parameters_of(read.effective_weight(), autocast_dtype(state))
        found, slot = residual.added_to(found), self._slot(history, f"read_{name}")
        (state, context, value, gate), _ = boundary(state, write, found, slot=slot)
        written = getattr(self, name)(context, *args, **kwargs)
        check_returned(name, written, context)
        slot = self._slot(history, f"res_{name}")
        write = residual.write(state, written, context, value, gate, slot=slot)
        return state, residual.hooked(state, write, continues=history is not None)

    def _opened(self, x: Tensor, history: History | None, name: str) -> Tensor:
        return opened(self._ends[0], x, slot=self._slot(history, name))

    def _read_out(self, state: Tensor, history: History | None, name: str) -> Tensor:
        """The raw final read, with which a pass ends; the history is committed."""
        slot = self._slot(history, name)
        x = boundary(state, None, self._ends[1].raw(state), slot=slot)[0].context
        if history is not None:
            history.commit()
        return x

    def _slot(self, history: History | None, name: str) -> Slot | None:
        return None if history is None else Slot(history, f"blocks.{self.number}.{name}")

    def _looks_back(self) -> bool:
        """Whether anything added is computed from several tokens."""
        expand, readout = self._ends
        convolved = self.res_attn.gate_from == "convolved"
        return expand.kind == "conv" or readout.compress == "token" or convolved
