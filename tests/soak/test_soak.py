"""A sample of `make soak`, and proof that it notices a fault."""

from __future__ import annotations

import torch

from ddl import functional
from tests.soak.__main__ import main
from tests.soak.check import check
from tests.soak.problem import OPERATORS, OUTPUTS, draw


def test_a_sample_of_the_problems(capsys):
    assert main(["--problems", "500"]) == 0, capsys.readouterr().out


def test_problems_are_varied():
    problems = [draw(0, number) for number in range(300)]
    assert {p.operator for p in problems} == set(OPERATORS)
    assert {p.threads for p in problems} == {1, 2, 3, 5}
    assert {n for p in problems for n in p.used} == set(OUTPUTS["rewrite_read"])
    tensors = [t for p in problems for t in p.tensors.values()]
    assert len({t.dtype for t in tensors}) == 4
    assert any(t.numel() == 0 for t in tensors)
    assert any(not t.is_contiguous() for t in tensors)
    assert any(t.data_ptr() % 16 for t in tensors)
    assert any(not p.wanted for p in problems)


def test_a_problem_is_the_same_alone():
    in_order = [draw(3, number) for number in range(4)]
    for number in (3, 1):
        assert str(draw(3, number)) == str(in_order[number])
        alone, drawn = draw(3, number).tensors, in_order[number].tensors
        assert all(torch.equal(alone[name], drawn[name]) for name in drawn)


def test_a_fault_is_noticed_and_can_be_repeated(monkeypatch, capsys):
    """One number of one token is off by two percent."""
    rewrite = functional.rewrite

    def faulty(state, **arguments):
        off = torch.zeros_like(state).flatten()
        off[-1:] = 0.02
        return rewrite(state, **arguments) + off.view(state.shape)

    monkeypatch.setattr(functional, "rewrite", faulty)
    assert main(["--problems", "100"]) == 1
    said = capsys.readouterr().out
    command = next(line for line in said.splitlines() if "repeat it" in line).split()
    number = int(command[-1])
    assert draw(0, number).operator == "rewrite"
    assert command[-5:-1] == ["tests.soak", "--seed", "0", "--only"]
    assert main(["--seed", "0", "--only", str(number)]) == 1
    monkeypatch.undo()
    check(draw(0, number))
