"""Small models with torchtitan's interface, as docs/trainers.md meets it; written for the tests.

A config builds its class, a module is filled by `init_states` after it was made on meta, and every
submodule has to be a `Module`. Tokens are packed: all documents of a batch are one sequence (T,),
and `positions` (T,) begins at 0 in each. `modules()` has the classes under torchtitan's paths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, LAYERS, VOCABULARY = 16, 2, 3, 40


class Module(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        owner: ClassVar[type]

        def build(self) -> Any:
            return self.owner(replace(self))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "Config" in vars(cls):
            cls.Config.owner = cls

    def init_states(self, *, buffer_device: Any = None) -> None:
        queue = list(self.children())
        while queue:
            child = queue.pop(0)
            if isinstance(child, Module):
                child.init_states(buffer_device=buffer_device)
            else:
                queue += child.children()
        reset = getattr(self, "reset_parameters", None)
        assert reset or not list(self.parameters(recurse=False)), type(self).__name__
        if reset:
            reset()


class ModuleDict(nn.ModuleDict, Module):
    pass


class Linear(nn.Linear, Module):
    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)


class Embedding(nn.Embedding, Module):
    pass


class RMSNorm(nn.RMSNorm, Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        normalized_shape: int
        eps: float = 1e-5

    def __init__(self, config: Config) -> None:
        super().__init__(config.normalized_shape, eps=config.eps)


class FusedQKVLinear(Module):
    """Queries, keys and values of each head side by side; heads are counted by the width."""

    def __init__(self, dim: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.wqkv = head_dim, Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.wqkv(x).view(len(x), -1, 3, self.head_dim).unbind(2)


class Attention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int
        n_heads: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.qkv_linear = FusedQKVLinear(config.dim, config.dim // config.n_heads)
        self.wo = Linear(config.dim, config.dim)

    def forward(self, x: Tensor, attention_masks: Any, positions: Any = None) -> Tensor:
        q, k, v = (each.transpose(0, 1) for each in self.qkv_linear(x))
        if positions is not None:
            q, k = (
                F.normalize(each + positions[:, None].sin().to(x.dtype), dim=-1) for each in (q, k)
            )
        seen = {"is_causal": True} if attention_masks is None else {"attn_mask": attention_masks}
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], **seen)[0]
        return self.wo(y.transpose(0, 1).flatten(1))


class FeedForward(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int

    def __init__(self, config: Config) -> None:
        super().__init__()
        d = config.dim
        self.w1, self.w2, self.w3 = Linear(d, 3 * d), Linear(3 * d, d), Linear(d, 3 * d)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Llama3TransformerBlock(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        attention: Attention.Config
        feed_forward: FeedForward.Config | None = None
        attention_norm: RMSNorm.Config
        ffn_norm: RMSNorm.Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention, self.attention_norm = (
            config.attention.build(),
            config.attention_norm.build(),
        )
        self.feed_forward, self.ffn_norm = config.feed_forward.build(), config.ffn_norm.build()

    def forward(self, x: Tensor, attention_masks: Any, positions: Any = None) -> Tensor:
        h = x + self.attention(self.attention_norm(x), attention_masks, positions)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama3Model(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        dim: int = D
        vocab_size: int = VOCABULARY
        norm: RMSNorm.Config
        layers: list[Any]

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.tok_embeddings = Embedding(config.vocab_size, config.dim)
        self.layers = ModuleDict({str(i): c.build() for i, c in enumerate(config.layers)})
        self.norm, self.lm_head = config.norm.build(), Linear(config.dim, config.vocab_size)

    def verify_module_protocol(self) -> None:
        others = [name for name, each in self.named_modules() if not isinstance(each, Module)]
        if others:
            raise RuntimeError(f"not of the Module protocol: {others}")

    def get_attention_masks(self, positions: Tensor) -> Tensor:
        document = (positions == 0).cumsum(0)
        return (document[:, None] == document).tril()

    def forward(self, tokens: Tensor, positions: Any = None, attention_masks: Any = None) -> Tensor:
        h = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            h = layer(h, attention_masks, positions)
        return self.lm_head(self.norm(h))


@dataclass(kw_only=True, slots=True)
class ParamGroupConfig:
    pattern: str
    optimizer_name: str
    optimizer_kwargs: dict[str, Any] = field(default_factory=dict)


def llama3_debugmodel() -> Any:
    norm = RMSNorm.Config(normalized_shape=D)
    block = Llama3TransformerBlock.Config(
        attention=Attention.Config(dim=D, n_heads=HEADS),
        feed_forward=FeedForward.Config(dim=D),
        attention_norm=norm,
        ffn_norm=norm,
    )
    model = Llama3Model.Config(norm=norm, layers=[replace(block) for _ in range(LAYERS)])
    adamw = {"lr": 8e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs=adamw)]
    return SimpleNamespace(
        model_spec=SimpleNamespace(model=model, parallelize_fn=None),
        optimizer=SimpleNamespace(param_groups=groups),
        parallelism=SimpleNamespace(spmd_backend="spmd_types"),
    )


class SelectiveAC:
    """Wraps each block of `model.layers`, as torchtitan's policies do; it saves products."""

    class Config:
        def build(self, dump_folder: str) -> SelectiveAC:
            return SelectiveAC()

    def apply(self, model: Any) -> None:
        from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
        from torch.utils.checkpoint import create_selective_checkpoint_contexts as contexts

        for name, block in model.layers.named_children():
            saved = partial(contexts, [torch.ops.aten.mm.default])
            wrapped = wrapper.checkpoint_wrapper(block, context_fn=saved, early_stop=False)
            model.layers.register_module(name, wrapped)


def disable_fsdp_gradient_division(model: nn.Module) -> None:
    """Do nothing but check: gloo cannot scale, so gradients here stay means over the processes."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)


def optimizer_of(config: Any, model: nn.Module, make: Callable[..., Any]) -> Any:
    """As OptimizersContainer: the first pattern that a parameter's name matches has it."""
    import re

    groups, left = [], dict(model.named_parameters())
    for each in config.optimizer.param_groups:
        found = [name for name in left if re.search(each.pattern, name)]
        assert found, each.pattern
        groups.append({"params": [left.pop(name) for name in found], **each.optimizer_kwargs})
    assert not left
    return make(groups)


def modules() -> dict[str, ModuleType]:
    """The modules of torchtitan that the page imports from."""
    names = {
        "components.optimizer": (ParamGroupConfig,),
        "distributed.fsdp": (disable_fsdp_gradient_division,),
        "models.llama3.config_registry": (llama3_debugmodel,),
        "models.llama3.model": (Llama3Model, Llama3TransformerBlock),
    }
    found: dict[str, ModuleType] = {}
    for name, members in names.items():
        path = ["torchtitan", *name.split(".")]
        for end in range(1, len(path) + 1):
            full = ".".join(path[:end])
            found.setdefault(full, ModuleType(full))
        vars(found[full]).update({member.__name__: member for member in members})
    return found
