"""A cached forward pass gives the result of the whole sequence, for any pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddl.lab.config import RESIDUALS, GPTConfig
from ddl.models import GPT, Cache
from ddl.models.cache import LEAST_GROWTH
from ddl.models.tokens import place
from ddl.nn.history import History
from tests.support.helpers import randomise_

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
# Models whose layers, or of two layers the first, have the delta rule over time for attention.
MIXED: dict[str, dict[str, object]] = {
    "mixers": {"residual": "additive", "mixer": "multi-kv", "mixer_n": 2},
    "hybrid": {
        "residual": "ddl-tc",
        "mixer": "deltaproduct",
        "mixer_layers": (0,),
        "mixer_n": 2,
        "mixer_gated": "per-feature",
    },
}
EVERY = (*RESIDUALS, *MIXED)


def model_of(residual: str, dtype: torch.dtype = torch.float64, **options: object) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 61, "block_size": 256, "num_layers": 2, "num_heads": 2}
    named = MIXED.get(residual, {"residual": residual})
    config = GPTConfig(hidden_size=32, **(sizes | named | options))
    model = GPT(config).to(dtype).eval().requires_grad_(False)
    randomise_(model.trunk, std=0.3)
    return model


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(61, (batch, length), generator=torch.Generator().manual_seed(seed))


def in_pieces(model: GPT, idx: Tensor, pieces: list[int], **options: object) -> Tensor:
    cache, logits = Cache(model.config), []
    for piece in idx.split(pieces, dim=1):
        logits.append(model(piece, cache=cache, **options).logits)
    assert cache.length == idx.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.table(1)
@pytest.mark.parametrize("residual", EVERY)
@pytest.mark.parametrize(
    "pieces", [[1] * 12, [8, 1, 3], [2, 1, 1, 8], [3, 9], [12]], ids=lambda p: "-".join(map(str, p))
)
def test_pieces_give_what_the_whole_gives(residual, pieces):
    model, idx = model_of(residual), tokens(2, 12)
    torch.testing.assert_close(
        in_pieces(model, idx, pieces), model(idx).logits, rtol=0, atol=TOLERANCE[torch.float64]
    )


@pytest.mark.table(1)
@pytest.mark.parametrize("residual", EVERY)
@pytest.mark.parametrize("prompt", range(1, 9))
def test_prompts_of_any_length_and_two_hundred_tokens(residual, prompt):
    dtype = torch.float32 if prompt == 5 else torch.float64
    model = model_of(residual, dtype)
    steps = 200 if prompt in (1, 5) else 12
    cache, idx = Cache(model.config), tokens(1, prompt)
    new, logits = idx, []
    for _ in range(steps):
        logits.append(model(new, cache=cache, last=1).logits[:, -1])
        new = logits[-1].argmax(-1, keepdim=True)
        idx = torch.cat((idx, new), dim=1)
    whole = model(idx[:, :-1]).logits[:, prompt - 1 :]
    torch.testing.assert_close(torch.stack(logits, dim=1), whole, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.table(1)
@pytest.mark.parametrize("residual", EVERY)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(residual, side):
    model, lengths, longest = model_of(residual), (1, 2, 5, 9), 9
    rows, masks = [], []
    for number, length in enumerate(lengths):
        row, pad = tokens(1, length, seed=number), torch.full((1, longest - length), 7)
        order = (pad, row) if side == "left" else (row, pad)
        rows.append(torch.cat(order, dim=1))
        ones = (torch.zeros_like(pad), torch.ones_like(row))
        masks.append(torch.cat(ones if side == "left" else ones[::-1], dim=1))
    batch, mask = torch.cat(rows), torch.cat(masks)
    logits = model(batch, attention_mask=mask).logits
    assert logits.isfinite().all()
    for number, length in enumerate(lengths):
        alone = model(tokens(1, length, seed=number)).logits[0]
        padded = logits[number, mask[number].bool()]
        torch.testing.assert_close(padded, alone, rtol=0, atol=TOLERANCE[torch.float64])


def test_every_token_attends_to_something():
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    placed = place(torch.zeros(2, 4, 8), mask, None)
    want = [[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]
    assert torch.equal(placed.visible[0].int(), torch.tensor(want))
    assert torch.equal(placed.visible[1, 0, 3].int(), torch.tensor([1, 1, 1, 1]))
    assert torch.equal(placed.keep.int(), mask.int())


@pytest.mark.parametrize("residual", EVERY)
def test_padded_batches_go_on_like_single_ones(residual):
    model, lengths, steps = model_of(residual), (1, 3, 8), 10
    longest = max(lengths)
    batch, mask = torch.full((3, longest), 5), torch.zeros(3, longest, dtype=torch.int64)
    for row, length in enumerate(lengths):
        batch[row, longest - length :] = tokens(1, length, seed=row)
        mask[row, longest - length :] = 1
    more = tokens(3, steps, seed=9)
    cache = Cache(model.config)
    got = [model(batch, attention_mask=mask, cache=cache, last=1).logits]
    for step in range(steps):
        mask = torch.cat((mask, mask.new_ones(3, 1)), dim=1)
        new = more[:, step : step + 1]
        got.append(model(new, attention_mask=mask, cache=cache).logits)
    for row, length in enumerate(lengths):
        idx = torch.cat((tokens(1, length, seed=row), more[row : row + 1]), dim=1)
        alone = model(idx).logits[0, length - 1 :]
        batched = torch.cat(got, dim=1)[row]
        torch.testing.assert_close(batched, alone, rtol=0, atol=TOLERANCE[torch.float64])


@pytest.mark.parametrize("residual", EVERY)
def test_selected_rows_go_on_from_their_own_past(residual):
    model, idx, rows = model_of(residual), tokens(3, 7), torch.tensor([2, 0, 0, 1])
    cache, more = Cache(model.config), tokens(4, 2, seed=3)
    model(idx, cache=cache)
    cache.select(rows)
    logits = model(more, cache=cache).logits
    whole = model(torch.cat((idx[rows], more), dim=1)).logits[:, -2:]
    torch.testing.assert_close(logits, whole, rtol=0, atol=TOLERANCE[torch.float64])


def test_the_options_that_reach_the_history():
    options = {"compress_parameterization": "factored", "expand_kernel_size": 6, "value": "sigmoid"}
    model = model_of(
        "ddl-tc", compress_kernel_size=5, value_from="compressed", gate="mlp", **options
    )
    idx = tokens(2, 11)
    torch.testing.assert_close(
        in_pieces(model, idx, [2, 1, 5, 3]), model(idx).logits, rtol=0, atol=1e-12
    )


def test_buffers_double_so_that_copies_stay_linear():
    model = model_of("additive", block_size=1024, num_layers=1)
    cache, addresses, copied = Cache(model.config), set(), 0
    for length in range(1, 600):
        before = cache._buffers[0]
        model(tokens(1, 1), cache=cache)
        if cache._buffers[0] is not before:
            copied += length - 1
            addresses.add(cache._buffers[0].data_ptr())
    assert cache._buffers[0].shape[3] <= 1024
    assert copied < 2 * 600
    assert len(addresses) <= 1 + (600 // LEAST_GROWTH).bit_length()


class NoReads(TorchDispatchMode):
    """Refuse operators that make the host wait for a device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func not in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
            torch.ops.aten.masked_select.default,
        ), f"{func} reads a tensor"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("residual", EVERY)
def test_a_decoding_step_reads_nothing_back(residual, monkeypatch):
    monkeypatch.setattr("ddl.models.tokens.on_host", lambda x: False)  # as for tensors on a GPU
    model, new = model_of(residual), tokens(2, 4)
    cache = Cache(model.config)
    with NoReads():
        for _ in range(3):
            mask = torch.ones(2, cache.length + new.shape[1], dtype=torch.int64)
            new = model(new, attention_mask=mask, cache=cache, last=1).logits.argmax(-1)
        with pytest.raises(AssertionError, match="reads a tensor"):
            new.sum().item()


def test_generate_is_the_uncached_loop():
    model, idx = model_of("ddl-tc", torch.float32, block_size=16), tokens(2, 5)
    got = model.generate(idx, 30, temperature=0)
    for _ in range(30):
        logits = model(idx[:, -16:]).logits[:, -1]
        idx = torch.cat((idx, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(got, idx)


def test_without_attention_generation_sees_all_tokens_in_constant_memory():
    model, idx = model_of("mixers", torch.float32, block_size=16), tokens(2, 37)
    got = model.generate(idx, 30, temperature=0)
    longer = model_of("mixers", torch.float32, block_size=128)  # the same weights
    assert torch.equal(got, longer.generate(idx, 30, temperature=0))
    cache = Cache(model.config)
    sizes = set()
    for piece in got.split(16, dim=1):
        model(piece, cache=cache)
        sizes.add(sum(kept.left.numel() for kept in cache.history._past.values()))
    assert cache.length == 67
    assert len(sizes) == 1
    assert cache._buffers == [None, None]


def test_what_was_generated_can_be_trained_on():
    model = model_of("ddl-cc").requires_grad_(True)
    out = model.generate(tokens(2, 3), 4)
    model(out, labels=out).loss.backward()
    assert model.wte.weight.grad.abs().sum() > 0


def test_last_gives_the_end_of_the_logits():
    model, idx = model_of("ddl-cc"), tokens(2, 6)
    torch.testing.assert_close(model(idx, last=2).logits, model(idx).logits[:, -2:])


def test_what_does_not_fit_is_refused():
    model, idx = model_of("ddl-tc", block_size=8), tokens(2, 6)
    cache = Cache(model.config)
    model(idx, cache=cache)
    with pytest.raises(
        ValueError, match=r"room for 3 more tokens, got one with 6 of block_size = 8$"
    ):
        model(tokens(2, 3), cache=cache)
    with pytest.raises(ValueError, match=r"^`cache` must have 1 sequences, as the input, got 2$"):
        model(tokens(1, 1), cache=cache)
    with pytest.raises(ValueError, match=r"^`cache` must be made of this model's config"):
        model_of("ddl-cc")(idx, cache=cache)
    with pytest.raises(
        ValueError, match=r"^`attention_mask` must have shape \(2, 7\), got \(2, 1\)$"
    ):
        model(tokens(2, 1), cache=cache, attention_mask=torch.ones(2, 1))
    holes = torch.tensor([[1, 1, 1, 1, 1, 0, 1], [1] * 7])
    with pytest.raises(ValueError, match="padding on the left to go on from a cache"):
        model(tokens(2, 1), cache=cache, attention_mask=holes)
    with pytest.raises(ValueError, match=r"^`last` must be from 1 to 6"):
        model(idx, last=7)
    with pytest.raises(ValueError, match=r"^`last` must be .* without `labels`"):
        model(idx, labels=idx, last=1)
    assert cache.length == 6
    with pytest.raises(
        ValueError, match=r"^`cache` must be used in one dtype, got torch.float32 after torch.float"
    ):
        model.float()(tokens(2, 1), cache=cache)


def test_what_was_refused_or_interrupted_can_be_done_again():
    model, idx = model_of("ddl-tc"), tokens(2, 6)
    cache, whole = Cache(model.config), model(idx).logits
    with pytest.raises(ValueError, match=r"^`cache` must be used under torch.no_grad"):
        model.requires_grad_(True)(idx[:1, :3], cache=cache)
    model.requires_grad_(False)
    for piece in idx.split([4, 2], dim=1):
        hook = model.trunk.sublayers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(piece, cache=cache)
        hook.remove()
        last = model(piece, cache=cache).logits
    torch.testing.assert_close(last, whole[:, -2:], rtol=0, atol=TOLERANCE[torch.float64])


def test_compiled_steps_from_a_cache():
    model, idx = model_of("ddl-tc"), tokens(2, 6)
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    cache = Cache(model.config)
    with torch.no_grad():
        logits = [compiled(piece, cache=cache).logits for piece in idx.split([3, 2, 1], dim=1)]
    torch.testing.assert_close(
        torch.cat(logits, dim=1), model(idx).logits, rtol=0, atol=TOLERANCE[torch.float64]
    )
    torch._dynamo.reset()


def test_a_history_keeps_what_is_committed():
    history, first, second = History(), torch.zeros(2, 3), torch.ones(2, 3)
    assert history.get("a") is None
    history.set("a", first)
    assert history.get("a") is None, "not before commit"
    history.commit()
    history.set("a", second)
    history.begin()
    history.commit()
    assert history.get("a") is first, "what was not committed is forgotten"
    history.set("a", torch.stack((first[0], second[0])))
    history.commit()
    history.select(torch.tensor([1, 1, 0]))
    assert history.get("a")[:, 0].tolist() == [1, 1, 0]
    assert history.resolved("key", lambda: 1) == history.resolved("key", lambda: 2) == 1
    assert history.resolved("other", lambda: 3) == 3


# --- static caches --------------------------------------------------------------------------------


def static_pieces(model: GPT, idx: Tensor, pieces: list[int], mask: Tensor | None) -> Tensor:
    cache, logits, addresses = Cache(model.config, static=True), [], []
    for number, piece in enumerate(idx.split(pieces, dim=1)):
        first = mask if number == 0 else None
        logits.append(model(piece, cache=cache, attention_mask=first).logits)
        buffers = [buffer for buffer in cache._buffers if buffer is not None]  # a mixer has none
        past = cache.history._past.values()
        kept = (*buffers, cache.static.position, *(each.left for each in past))
        addresses.append([tensor.data_ptr() for tensor in kept])
    assert all(now == addresses[0] for now in addresses), "everything stays where it was"
    assert cache.length == idx.shape[1]
    return torch.cat(logits, dim=1)


@pytest.mark.table(1)
@pytest.mark.parametrize("residual", EVERY)
@pytest.mark.parametrize("pieces", [[1] * 12, [8, 1, 3], [2, 1, 1, 8], [12]], ids=str)
def test_a_static_cache_gives_the_same_logits(residual, pieces):
    model, idx = model_of(residual), tokens(2, 12)
    torch.testing.assert_close(
        static_pieces(model, idx, pieces, None), model(idx).logits, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("residual", EVERY)
def test_a_static_cache_remembers_the_padding(residual):
    model, idx, lengths = model_of(residual), tokens(3, 14), (8, 3, 5)
    mask = torch.arange(8) >= 8 - torch.tensor(lengths)[:, None]
    logits = static_pieces(model, idx, [8, 1, 1, 4], mask.long())
    for row, length in enumerate(lengths):
        alone = model(idx[row : row + 1, 8 - length :]).logits[0]
        torch.testing.assert_close(logits[row, 8 - length :], alone, rtol=0, atol=1e-12)


@pytest.mark.parametrize("residual", ["additive", "ddl-tc"])
def test_a_static_cache_reads_nothing_back_and_is_reordered(residual, monkeypatch):
    model, idx = model_of(residual), tokens(3, 7)
    cache, rows, more = Cache(model.config, static=True), torch.tensor([2, 0, 0]), tokens(3, 2, 3)
    model(idx, cache=cache)
    monkeypatch.setattr("ddl.models.tokens.on_host", lambda x: False)  # as for tensors on a GPU
    monkeypatch.setattr(Cache, "check", lambda *_: None)  # it counts on the CPU alone
    with NoReads():
        cache.select(rows)
        logits = [model(piece, cache=cache).logits for piece in more.split(1, dim=1)]
    whole = model(torch.cat((idx[rows], more), dim=1)).logits[:, -2:]
    torch.testing.assert_close(torch.cat(logits, dim=1), whole, rtol=0, atol=1e-12)


def test_what_does_not_fit_a_static_cache_is_refused():
    model, idx = model_of("ddl-tc", block_size=8), tokens(2, 6)
    cache = Cache(model.config, static=True)
    behind = torch.tensor([[1, 1, 1, 1, 1, 0], [1] * 6])
    with pytest.raises(ValueError, match="padding on the left to go on from a cache"):
        model(idx, cache=cache, attention_mask=behind)
    with pytest.raises(ValueError, match=r"^`attention_mask` must have shape \(2, 6\)"):
        model(idx, cache=cache, attention_mask=behind[:, 1:])
    model(idx, cache=cache)
    with pytest.raises(ValueError, match="left out after the first pass of a static cache"):
        model(idx[:, :1], cache=cache, attention_mask=torch.ones(2, 7))
    with pytest.raises(ValueError, match="room for 3 more tokens, got one with 6 of block_size"):
        model(idx[:, :3], cache=cache)
    with pytest.raises(ValueError, match=r"^`rows` must be 2 rows, as many as the static"):
        cache.select(torch.tensor([0, 1, 1]))


def test_an_interrupted_pass_over_a_static_cache_can_be_repeated():
    model, idx = model_of("ddl-tc"), tokens(2, 6)
    cache, whole = Cache(model.config, static=True), model(idx).logits
    for piece in idx.split([4, 2], dim=1):
        hook = model.trunk.sublayers[3].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(piece, cache=cache)
        hook.remove()
        last = model(piece, cache=cache).logits
    torch.testing.assert_close(last, whole[:, -2:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("static", [False, True])
def test_convolutions_over_one_token(static):
    taps = {"gate_kernel_size": 1, "expand_kernel_size": 1, "compress_kernel_size": 1}
    model, idx = model_of("ddl-tc", gate_from="convolved", **taps), tokens(2, 9)
    cache = Cache(model.config, static=static)
    parts = [model(piece, cache=cache).logits for piece in idx.split([4, 1, 4], dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(idx).logits, rtol=0, atol=1e-12)
