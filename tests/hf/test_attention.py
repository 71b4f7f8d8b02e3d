"""Every attention function of transformers gives the same results, padded, packed and cached."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers import modeling_flash_attention_utils as flash
from transformers.integrations import flex_attention as flex
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ddl.hf import DDLConfig, DDLForCausalLM, DDLModel, from_gpt
from ddl.hf.attention import _causal_blocks
from ddl.hf.cache import CACHE
from tests.support.hf_cases import model, nanogpt, padded, small, tokens

IMPLEMENTATIONS = ("eager", "flex_attention", "flash_attention_2")
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
every_residual = pytest.mark.parametrize("residual", ["additive", "ddl-tc"])
IDX = tokens(3, 24)
DELTA = {"value_channels": 2, "compress": "token", "expand": "conv"}


# --- flash attention without a GPU ----------------------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float) -> Tensor:
    """Do as a flash kernel, on (B, T, H, head_dim): the last query sees the last key."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * softmax_scale
    if causal:
        seen = torch.ones(scores.shape[2:], dtype=torch.bool)
        scores = scores.masked_fill(~seen.tril(seen.shape[1] - seen.shape[0]), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def attend_by_lengths(
    q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **options: Any
) -> Tensor:
    """Do as `attend` for sequences of these lengths in one row, (tokens, H, head_dim)."""
    queries = q.split(cu_seqlens_q.diff().tolist())
    keys, values = (x.split(cu_seqlens_k.diff().tolist()) for x in (k, v))
    parts = [
        attend(*(x[None] for x in one), **options)[0]
        for one in zip(queries, keys, values, strict=True)
    ]
    return torch.cat(parts)


@pytest.fixture
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put plain PyTorch in place of the kernels of flash and flex attention, below transformers'
    own code: the first need a GPU, the others a minute of compiling."""

    def options(*, is_causal: bool, softmax_scale: float, **_: Any) -> dict[str, Any]:
        return {"causal": is_causal, "softmax_scale": softmax_scale}

    kernels = (attend, attend_by_lengths, None, flash._pad_input, flash._unpad_input)
    monkeypatch.setattr(flex, "compile_friendly_flex_attention", plain_flex)
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda _: (kernels, (options, None)))


def plain_flex(q: Tensor, k: Tensor, v: Tensor, *, training: bool, **options: Any) -> Tensor:
    return flex_attention(q, k, v, **options)


def switch(hf: PreTrainedModel, implementation: str) -> None:
    if implementation == "flash_attention_2":  # which is refused without a GPU
        hf.config._attn_implementation_internal = implementation
    else:
        hf.set_attn_implementation(implementation)
        assert hf.config._attn_implementation == implementation


# --- our models -----------------------------------------------------------------------------------


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@every_implementation
@every_residual
@torch.no_grad()
def test_it_computes_the_same(residual: str, implementation: str, plain_kernels: None) -> None:
    hf = from_gpt(model(residual=residual)).double()
    sides = [padded(IDX, [24, 3, 9], side) for side in ("left", "right")]
    starts = torch.zeros(3, 24, dtype=torch.bool)
    starts[0, 5] = starts[1, 20] = starts[2, 1] = True
    passes: list[Callable[[], Tensor]] = [
        lambda: hf(IDX).logits,
        *(
            lambda ids=ids, mask=mask: hf(ids, attention_mask=mask).logits[mask.bool()]
            for ids, mask in sides
        ),
        lambda: hf(IDX, document_starts=starts).logits,
        lambda: hf.generate(IDX[:, :9], max_new_tokens=6).float(),
        lambda: hf.generate(
            sides[0][0], attention_mask=sides[0][1], max_new_tokens=6, prefill_chunk_size=5
        ).float(),
    ]
    expected = [compute() for compute in passes]
    switch(hf, implementation)
    for compute, result in zip(passes, expected, strict=True):
        close(compute(), result)


@every_implementation
@pytest.mark.parametrize("delta", [None, DELTA], ids=["additive", "converted"])
@torch.no_grad()
def test_it_computes_the_same_for_nanogpt(
    delta: dict[str, Any] | None, implementation: str, plain_kernels: None
) -> None:
    hf = from_gpt(nanogpt(delta=delta)).double()
    ids, mask = padded(IDX, [24, 3, 9], "left")
    expected = hf(ids, attention_mask=mask).logits[mask.bool()]
    switch(hf, implementation)
    close(hf(ids, attention_mask=mask).logits[mask.bool()], expected)


@every_implementation
@torch.no_grad()
def test_a_shared_gpt_attends_by_itself(implementation: str, plain_kernels: None) -> None:
    gpt = model(residual="ddl-tc").double()
    mask = padded(IDX, [24, 3, 9], "left")[1]
    expected = gpt(IDX).logits, gpt(IDX, attention_mask=mask).logits
    switch(from_gpt(gpt), implementation)
    close(gpt(IDX).logits, expected[0])
    close(gpt(IDX, attention_mask=mask).logits, expected[1])


@torch.no_grad()
def test_models_that_share_modules(plain_kernels: None) -> None:
    gpt = model(residual="ddl-tc").double()
    starts = torch.zeros(3, 24, dtype=torch.bool)
    starts[:, 9] = True
    first, expected = from_gpt(gpt), gpt(IDX, document_starts=starts).logits
    switch(first, "flash_attention_2")
    second = from_gpt(gpt)
    for hf in (first, second, first):
        close(hf(IDX, document_starts=starts).logits, expected)


@pytest.mark.parametrize("make", [model, nanogpt])
@torch.no_grad()
def test_models_that_share_modules_attend_by_their_own_configs(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = make()
    called: list[str] = []

    def counted(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: (
            called.append(name) or sdpa_attention_forward(*args, **kwargs)
        )

    for name in ("eager", "sdpa"):
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, name, counted(name))
    first, second = from_gpt(shared), from_gpt(shared)
    first.set_attn_implementation("eager")
    for hf, name in ((first, "eager"), (second, "sdpa"), (first, "eager")):
        called.clear()
        hf(IDX)
        assert set(called) == {name}


def test_a_kept_mask_of_flex_attention_can_be_used_in_training(plain_kernels: None) -> None:
    _causal_blocks.cache_clear()
    hf = from_gpt(model())
    switch(hf, "flex_attention")
    with torch.inference_mode():
        hf(IDX)
    assert not _causal_blocks(24, IDX.device).kv_num_blocks.is_inference()


def test_eager_attention_has_the_same_gradients() -> None:
    hf = from_gpt(model(residual="ddl-cc")).double()
    found = []
    for implementation in ("sdpa", "eager"):
        hf.zero_grad()
        hf.set_attn_implementation(implementation)
        hf(IDX, labels=IDX).loss.backward()
        found.append({name: p.grad.clone() for name, p in hf.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-9, atol=1e-12)


def test_from_the_first_on(tmp_path: Any) -> None:
    from_gpt(model()).save_pretrained(tmp_path)
    auto: Any = AutoModelForCausalLM
    hf = auto.from_pretrained(tmp_path, attn_implementation="eager")
    assert hf.config._attn_implementation == hf.model.config._attn_implementation == "eager"
    expected = auto.from_pretrained(tmp_path)(IDX).logits
    torch.testing.assert_close(hf(IDX).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("what", ["padding", "tokens in the cache"])
@torch.no_grad()
def test_documents_that_flash_attention_cannot_keep_apart(what: str, plain_kernels: None) -> None:
    hf = from_gpt(model())
    switch(hf, "flash_attention_2")
    starts = torch.zeros(3, 24, dtype=torch.bool)
    starts[:, 20] = True
    ids, mask = padded(IDX, [24, 3, 9], "left")
    sentence = f"with an empty cache for flash attention, got {what}: load with attn_impl"
    if what == "padding":
        given = {"input_ids": ids, "attention_mask": mask, "document_starts": starts}
    else:
        past = hf(IDX[:, :9], use_cache=True)[CACHE]
        given = {"input_ids": IDX[:, 9:], CACHE: past, "document_starts": starts[:, 9:]}
    with pytest.raises(ValueError, match=sentence):
        hf(**given)


# --- the function of a serving engine -------------------------------------------------------------


class Engine:
    """Keys and values of several requests, as a serving engine keeps them: one row of tokens.

    A pass has the next tokens of each request, one request after the other, in a batch of one.
    """

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], Tensor] = {}
        self.values: dict[tuple[int, int], Tensor] = {}

    def attend(
        self, layer: int, lengths: dict[int, int], q: Tensor, k: Tensor, v: Tensor, scaling: float
    ) -> Tensor:
        parts = []
        for request, *new in zip(
            lengths, *(x[0].split([*lengths.values()], 1) for x in (q, k, v)), strict=True
        ):
            query, key, value = new
            for kept, more in ((self.keys, key), (self.values, value)):
                past = kept.get((layer, request), more[:, :0])
                kept[layer, request] = torch.cat((past, more), dim=1)
            past_k, past_v = self.keys[layer, request], self.values[layer, request]
            one = [x.transpose(0, 1)[None] for x in (query, past_k, past_v)]
            parts.append(attend(*one, causal=True, softmax_scale=scaling)[0])
        return torch.cat(parts)[None]


@pytest.fixture
def engine() -> Iterator[str]:
    def by_engine(
        module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        assert mask is None
        past, lengths = kwargs["attention_instances"][module.layer_idx], kwargs["lengths"]
        y = past.attend(module.layer_idx, lengths, q, k, v, scaling)  # (1, tokens, H, head_dim)
        return y[0].flatten(1), None

    ALL_ATTENTION_FUNCTIONS.register("engine", by_engine)
    yield "engine"
    del ALL_ATTENTION_FUNCTIONS._global_mapping["engine"]


class EnginesLinear(nn.Module):
    """A layer that an engine puts in place of an nn.Linear."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size_out, size_in, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


@pytest.mark.parametrize("residual", ["additive", "ddl", "ddl-cc-noec", "mhc"])
@torch.inference_mode()
def test_an_engine_serves_requests_side_by_side(residual: str, engine: str) -> None:
    """The steps of vLLM's backend for transformers: layers of its own, flat tokens, positions."""
    gpt = model(residual=residual).double()
    served: Any = AutoModel.from_config(
        DDLConfig.from_gpt(gpt.config), attn_implementation=engine, dtype=torch.float64
    )
    assert isinstance(served.eval(), DDLModel)
    assert served.is_backend_compatible()
    for module in list(served.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, EnginesLinear(child.in_features, child.out_features))
    served.set_input_embeddings(nn.Embedding(61, 32, dtype=torch.float64))
    served.load_state_dict(gpt.state_dict())
    instances = dict.fromkeys(range(2), Engine())
    hidden: dict[int, list[Tensor]] = {0: [], 1: []}
    for spans in ({0: (0, 9), 1: (0, 4)}, {0: (9, 10), 1: (4, 24)}, {0: (10, 11)}):
        flat = torch.cat([IDX[request, slice(*span)] for request, span in spans.items()])
        positions = torch.cat([torch.arange(*span) for span in spans.values()])
        lengths = {request: last - first for request, (first, last) in spans.items()}
        h = served(
            input_ids=flat[None],
            position_ids=positions[None],
            use_cache=False,
            attention_instances=instances,
            lengths=lengths,
            return_dict=False,
        )[0][0]
        for request, part in zip(spans, h.split([*lengths.values()]), strict=True):
            hidden[request].append(part)
    for request, last in ((0, 11), (1, 24)):
        expected = gpt.hidden_states(gpt.wte(IDX[request : request + 1, :last]))[0]
        close(torch.cat(hidden[request]), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"residual": "ddl-tc-noec"},
        {"residual": "ddl-cc"},
        {"residual": "ddl", "gate_from": "convolved"},
        {"residual": "additive-conv"},
        {"residual": "additive", "mixer": "deltanet"},
    ],
    ids=str,
)
def test_an_engine_cannot_serve_what_needs_the_past(options: dict[str, Any], engine: str) -> None:
    hf = DDLForCausalLM(DDLConfig(**vars(small(**options)), attn_implementation=engine))
    sentence = '`attn_implementation` must not be "engine", which keeps keys and values alone: '
    with pytest.raises(ValueError, match=f"^{re.escape(sentence)}reads of several tokens"):
        hf(IDX, position_ids=torch.arange(24)[None])


@pytest.mark.parametrize("name", ["attention_mask", "seq_idx"])
def test_an_engine_gets_no_mask(name: str, engine: str) -> None:
    config = DDLConfig(**vars(small(residual="ddl")), attn_implementation=engine)
    sentence = 'must not be "engine" in training, nor with a cache, `attention_mask`'
    with pytest.raises(ValueError, match=sentence):
        DDLForCausalLM(config).eval()(IDX, **{name: torch.ones_like(IDX)})


@pytest.fixture
def own(engine: str) -> Iterator[str]:
    ALL_ATTENTION_FUNCTIONS.register(engine, sdpa_attention_forward)
    yield engine
    ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(engine, None)


def test_a_registered_function_trains_with_masks(own: str) -> None:
    """Without masks it would let documents see one another."""
    hf = from_gpt(model(residual="ddl")).train()
    positions = torch.arange(24)[None] % 10
    expected = hf(IDX, position_ids=positions).logits
    hf.set_attn_implementation(own)
    with pytest.raises(
        ValueError, match=r'^`attn_implementation` must not be "engine" in training'
    ):
        hf(IDX, position_ids=positions)
    ALL_MASK_ATTENTION_FUNCTIONS.register(own, sdpa_mask)
    assert torch.equal(hf(IDX, position_ids=positions).logits, expected)


@pytest.mark.parametrize("kind", ["GPT", "nanoGPT"])
def test_a_registered_function_with_masks_of_another_form(kind: str, own: str) -> None:
    hf = from_gpt(model() if kind == "GPT" else nanogpt())
    ALL_MASK_ATTENTION_FUNCTIONS.register(own, eager_mask)  # numbers to add
    hf.set_attn_implementation(own)
    with pytest.raises(ValueError, match=r"must be those of sdpa_mask, .*, got eager_mask$"):
        hf(IDX)
