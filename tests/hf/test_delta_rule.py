"""transformers' models of the delta rule on our kernel: the same numbers, and back again."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from ddl.hf import accelerate_delta_rule, delta_rule
from tests.support.hf_cases import VOCABULARY, tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "layer_types": ["linear_attention", "full_attention"],
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHARED = {"shared_expert_intermediate_size": 16}
GROUPED = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
KIMI = {"linear_num_heads": 2, "linear_head_dim": 8}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3Next": {**SIZES, **EXPERTS, **SHARED, **GROUPED, "head_dim": 16},
    "Qwen3_5": {**SIZES, **GROUPED, "head_dim": 16},
    "Qwen3_5Moe": {**SIZES, **EXPERTS, **SHARED, **GROUPED, "head_dim": 16},
    "OlmoHybrid": {**SIZES, **GROUPED},
    "KimiLinear": {**SIZES, **EXPERTS, **KIMI, "num_key_value_heads": 2},
}
every_model = pytest.mark.parametrize("name", MODELS)
# From 5.23 on the functions take fewer heads of q and k; before, the models repeat these.
FUNCTIONS_GROUP = Version(transformers.__version__) >= Version("5.23")


@pytest.fixture
def accelerated() -> Iterator[None]:
    undo = accelerate_delta_rule()
    yield
    undo()


def make(name: str) -> Any:
    """A model whose decays and gates are not all alike."""
    kinds = (getattr(transformers, f"{name}{end}", None) for end in ("TextConfig", "Config"))
    config = next((kind for kind in kinds if kind is not None), None)
    if config is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config(**MODELS[name])).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def trained(model: Any, idx: Tensor) -> dict[str, Tensor]:
    """Logits, loss and all gradients."""
    model.zero_grad(set_to_none=True)
    found = model(idx, labels=idx)
    found.loss.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"logits": found.logits.detach(), "loss": found.loss.detach(), **gradients}


def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of what our operator computes from now on."""
    seen: list[int] = []
    operator = delta_rule.delta_rule

    def counted(q: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(q.shape[1])
        return operator(q, *args, **kwargs)

    monkeypatch.setattr(delta_rule, "delta_rule", counted)
    return seen


@every_model
def test_logits_and_gradients_are_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, idx = make(name), tokens(2, 70)
    before, seen = trained(model, idx), calls(monkeypatch)
    undo = accelerate_delta_rule()
    after = trained(model, idx)
    undo()
    assert [length for length in seen if length > 5] == [70]
    assert before.keys() == after.keys()
    for key, expected in before.items():
        # Theirs take differences of sums over 64 decays, and a head's decays have gradients that
        # nearly cancel; in float32 ours are nearer to the reference.
        tolerance = 5e-3 if key.endswith(("A_log", "dt_bias", "in_proj_a.weight")) else 1e-4
        limit = tolerance * (float(expected.abs().max()) or 1.0)
        torch.testing.assert_close(after[key], expected, rtol=0, atol=limit, msg=key)
    seen.clear()
    again = trained(model, idx)
    assert seen == []
    assert torch.equal(again["logits"], before["logits"])


@every_model
def test_generated_tokens_are_as_before(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With left padding; the state of the prompt goes on, step by step."""
    model, idx = make(name), tokens(2, 9)
    mask = torch.ones_like(idx)
    mask[0, :3] = 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    before, seen = model.generate(idx, **options), calls(monkeypatch)
    undo = accelerate_delta_rule()
    seen.clear()
    after = model.generate(idx, **options)
    undo()
    assert seen == [9, *[1] * 11]
    assert torch.equal(after, before)


@pytest.mark.table(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("T", [1, 63, 130])
def test_every_function_of_the_installed_version(dtype: torch.dtype, unit: bool, T: int) -> None:
    """Grouped heads, a state before, and gradients, in every module that has a copy."""
    found = [(m, n) for m in delta_rule._modules() for n in delta_rule.FUNCTIONS if hasattr(m, n)]
    assert len({module for module, _ in found}) >= 3
    for module, name in found:
        theirs = inspect.unwrap(getattr(module, name))
        kimi = delta_rule.FUNCTIONS[name]
        heads = (4, 4) if kimi or not FUNCTIONS_GROUP else (2, 4)
        torch.manual_seed(0)
        q, k = (torch.randn(2, T, heads[0], 8) / 3 for _ in range(2))
        v, beta = torch.randn(2, T, heads[1], 16), torch.rand(2, T, heads[1])
        g = -torch.rand(2, T, heads[1], *((8,) if kimi else ()))
        state = torch.randn(2, heads[1], 8, 16)
        given = [x.to(dtype) for x in (q, k, v, g, beta)] + [state]
        results = []
        undo = accelerate_delta_rule()
        for function in (theirs, getattr(module, name)):
            leaves = [x.detach().requires_grad_() for x in given]
            y, last = function(
                *leaves[:5],
                initial_state=leaves[5],
                output_final_state=True,
                use_qk_l2norm_in_kernel=unit,
            )
            grads = torch.autograd.grad([y.float().sin().sum() + last.sin().sum()], leaves)
            results.append([y, last, *grads])
        undo()
        for expected, actual in zip(*results, strict=True):
            assert actual.dtype == expected.dtype
            scale = float(expected.float().abs().max())
            tolerance = (1e-4 if dtype == torch.float32 else 2e-2) * scale
            torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=name)


def test_calls_nest_and_undo_leaves_what_others_replaced() -> None:
    module = next(iter(delta_rule._modules()))
    name = next(n for n in delta_rule.FUNCTIONS if hasattr(module, n))
    theirs = getattr(module, name)
    first, second = accelerate_delta_rule(), accelerate_delta_rule()
    ours = getattr(module, name)
    assert ours is not theirs
    second()
    assert getattr(module, name) is ours
    setattr(module, name, print)
    first()
    assert getattr(module, name) is print
    setattr(module, name, theirs)


@pytest.mark.usefixtures("accelerated")
def test_packed_sequences_go_to_transformers() -> None:
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    q, v, b = torch.randn(1, 4, 2, 8), torch.randn(1, 4, 2, 8), torch.rand(1, 4, 2)
    with pytest.raises(ValueError, match="packed sequences"):
        module.torch_chunk_gated_delta_rule(q, q, v, g=-b, beta=b, cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.usefixtures("accelerated")
def test_compiled_without_breaks() -> None:
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    heads = 2 if FUNCTIONS_GROUP else 4
    q, v, b = torch.randn(1, 9, heads, 8), torch.randn(1, 9, 4, 8), torch.rand(1, 9, 4)
    call = torch.compile(module.torch_chunk_gated_delta_rule, fullgraph=True, backend="aot_eager")
    expected = module.torch_chunk_gated_delta_rule(q, q, v, g=-b, beta=b)[0]
    torch.testing.assert_close(call(q, q, v, g=-b, beta=b)[0], expected)


# --- what transformers may change -----------------------------------------------------------------


def changed_arguments(query: Any, key: Any, value: Any, g: Any, beta: Any, mode: Any) -> Any: ...


def fewer_arguments(query: Any, key: Any, value: Any, g: Any, beta: Any) -> Any: ...


def changed_numbers(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs: Any,
) -> Any:
    return value, initial_state


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        (changed_arguments, r"the arguments beta, .* of \S*torch_chunk\S+, .* got .*, mode in"),
        (
            fewer_arguments,
            r"the arguments beta, .* of \S*torch_chunk\S+, .* got query, .*, beta in",
        ),
        (changed_numbers, r"the gated delta rule in .*torch_chunk\S+, .* got another one"),
    ],
)
def test_what_transformers_has_changed_is_refused(
    function: Any, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing is replaced."""
    module = importlib.import_module("transformers.models.qwen3_next.modeling_qwen3_next")
    other = module.torch_recurrent_gated_delta_rule
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", function)
    with pytest.raises(RuntimeError, match=f"`transformers` must have {sentence}"):
        accelerate_delta_rule()
    assert module.torch_recurrent_gated_delta_rule is other


def test_a_version_without_such_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "_modules", tuple)
    expected = re.escape("`transformers` must have a model of the delta rule, as version 5.23 has")
    with pytest.raises(RuntimeError, match=f"^{expected}"):
        accelerate_delta_rule()


@pytest.mark.parametrize(
    ("value", "is_ours"),
    [("1", True), *(pytest.param(off, False, marks=pytest.mark.exhaustive) for off in ("0", None))],
)
def test_the_environment_variable(value: str | None, is_ours: bool) -> None:
    code = (
        "import ddl.hf, transformers.models.qwen3_next.modeling_qwen3_next as m;"
        "print(hasattr(m.torch_chunk_gated_delta_rule, 'accelerates'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "DDL_ACCELERATE_DELTA_RULE"}
    if value is not None:
        environment["DDL_ACCELERATE_DELTA_RULE"] = value
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == str(is_ours)
