"""The reference's delta rule over time against what its sources say of it, one statement a test."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ddl import reference

F64 = torch.float64
B, T, H, K, V = 2, 7, 2, 5, 3


def problem(*, steps: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """float64 arguments with unit keys and β in [0, 2]."""
    torch.manual_seed(0)
    k = torch.randn(B, T, *steps, H, K, dtype=F64)
    return {
        "q": torch.randn(B, T, H, K, dtype=F64),
        "k": k / k.norm(dim=-1, keepdim=True),
        "v": torch.randn(B, T, *steps, H, V, dtype=F64),
        "beta": 2 * torch.rand(B, T, *steps, H, dtype=F64),
    }


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_each_step_multiplies_by_a_householder_map_and_adds_the_write():
    """S_t = a (I − β k kᵀ) S_{t−1} + β k vᵀ, y = scale · Sᵀq: eq. 10 of Gated DeltaNet."""
    given = problem()
    g = -torch.rand(B, T, H, dtype=F64)
    found = reference.delta_rule(**given, g=g, scale=0.7)
    for b in range(B):
        for h in range(H):
            S = torch.zeros(K, V, dtype=F64)
            for t in range(T):
                q, k, v = (given[name][b, t, h] for name in "qkv")
                beta = given["beta"][b, t, h]
                S = g[b, t, h].exp() * (torch.eye(K, dtype=F64) - beta * k.outer(k)) @ S
                S = S + beta * k.outer(v)
                close(found.y[b, t, h], 0.7 * S.T @ q)
            close(found.final_state[b, h], S)


def test_a_gate_of_one_writes_the_value_and_a_gate_of_zero_nothing():
    given = problem()
    given["beta"] = torch.ones(B, T, H, dtype=F64)
    given["q"] = given["k"]
    close(reference.delta_rule(**given, scale=1.0).y, given["v"])
    given["beta"] = torch.zeros(B, T, H, dtype=F64)
    S = torch.randn(B, H, K, V, dtype=F64)
    assert torch.equal(reference.delta_rule(**given, initial_state=S).final_state, S)


def test_n_steps_are_n_tokens_of_which_the_first_decays_and_the_last_is_queried():
    n = 3
    given, g = problem(steps=(n,)), -torch.rand(B, T, H, dtype=F64)
    found = reference.delta_rule(**given, g=g)
    apart = {name: x.flatten(1, 2) for name, x in given.items() if name != "q"}
    decay = torch.zeros(B, T, n, H, dtype=F64)
    decay[:, :, 0] = g
    q = given["q"].unsqueeze(2).expand(B, T, n, H, K).flatten(1, 2)
    one = reference.delta_rule(q, **apart, g=decay.flatten(1, 2))
    close(found.y, one.y[:, n - 1 :: n])
    close(found.final_state, one.final_state)


def test_heads_broadcast_as_in_grouped_attention():
    given = problem()
    few = given | {"q": given["q"][:, :, :1], "k": given["k"][:, :, :1]}
    same = given | {name: few[name].expand(B, T, H, K) for name in "qk"}
    assert torch.equal(reference.delta_rule(**few).y, reference.delta_rule(**same).y)
    torch.manual_seed(1)
    many = given | {"q": torch.randn(B, T, 2 * H, K, dtype=F64)}
    y = reference.delta_rule(**many).y
    assert y.shape == (B, T, 2 * H, V)
    for each in range(2):  # queries 0 and 1 are to state 0, 2 and 3 to state 1
        one = reference.delta_rule(**given | {"q": many["q"][:, :, each::2]})
        assert torch.equal(y[:, :, each::2], one.y)


def test_a_decay_per_feature_equals_one_per_head_if_all_are_alike():
    given, g = problem(), -torch.rand(B, T, H, dtype=F64)
    one = reference.delta_rule(**given, g=g)
    close(reference.delta_rule(**given, g=g[..., None].expand(B, T, H, K)).y, one.y)


def test_a_decay_per_feature_forgets_what_is_stored_under_it():
    given = problem()
    given["beta"] = torch.zeros(B, T, H, dtype=F64)
    only = torch.full((B, T, H, K), -math.inf, dtype=F64)
    only[..., 0] = 0.0  # forgets all but the first key feature
    ones = torch.ones(B, H, K, V, dtype=F64)
    state = reference.delta_rule(**given, g=only, initial_state=ones).final_state
    assert torch.equal(state[:, :, 0], ones[:, :, 0])
    assert not state[:, :, 1:].any()


def test_documents_are_sequences_of_their_own():
    given, g = problem(), -torch.rand(B, T, H, dtype=F64)
    starts = torch.zeros(B, T, dtype=torch.bool)
    starts[0, 3] = starts[1, 0] = starts[1, 5] = True
    S = torch.randn(B, H, K, V, dtype=F64)
    found = reference.delta_rule(**given, g=g, initial_state=S, document_starts=starts)

    def alone(b: int, tokens: slice, state: Tensor | None) -> None:
        part = {name: x[b : b + 1, tokens] for name, x in (given | {"g": g}).items()}
        one = reference.delta_rule(**part, initial_state=state)
        assert torch.equal(found.y[b : b + 1, tokens], one.y)
        if tokens.stop == T:
            assert torch.equal(found.final_state[b : b + 1], one.final_state)

    alone(0, slice(0, 3), S[:1])
    alone(0, slice(3, T), None)
    alone(1, slice(0, 5), None)
    alone(1, slice(5, T), None)


def test_a_sequence_in_pieces_equals_the_whole_one_and_none_keeps_its_state():
    given = problem()
    whole = reference.delta_rule(**given)
    first = reference.delta_rule(**{name: x[:, :4] for name, x in given.items()})
    rest = {name: x[:, 4:] for name, x in given.items()}
    second = reference.delta_rule(**rest, initial_state=first.final_state)
    assert torch.equal(whole.y, torch.cat((first.y, second.y), 1))
    assert torch.equal(whole.final_state, second.final_state)
    none = reference.delta_rule(**{name: x[:, :0] for name, x in given.items()},
                                initial_state=first.final_state)  # fmt: skip
    assert none.y.shape == (B, 0, H, V)
    assert torch.equal(none.final_state, first.final_state)
