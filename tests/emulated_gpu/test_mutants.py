"""Tests of the tests: a kernel with one small fault must fail on the emulated GPU.

Each mutant is one replacement in a copy of the kernels. A sample of test_ops.py, `sample`, has to
fail: rewrite_read and expand under several plans and three orders of threads. Roundings at the
wrong place are within its tolerances; they have to fail test_exact.py.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddl import functional
from tests.emulated_gpu.test_exact import check_bits
from tests.emulated_gpu.test_ops import check_conversions
from tests.emulator.build import KERNELS
from tests.ops import test_cached
from tests.ops.test_documents import MASKS, read_arguments
from tests.ops.test_ops import compare
from tests.support.emulated_device import emulated, needs_emulator
from tests.support.op_cases import BF16, F32, F64, inputs, parameters

pytestmark = needs_emulator

FORWARD, BACKWARD = "rewrite_read_fwd.cu", "rewrite_read_bwd.cu"
EARLIER, LATER, REWRITES = "earlier_tokens.cuh", "later_tokens.cuh", "rewrites_bwd.cuh"
SEPARATE, SUM, TILE = "parameters_bwd.cu", "block_sum.cuh", "tile.cuh"
MUTANTS = {
    # barriers and buffers
    "no barrier in the block sum": (SUM, "    __syncthreads();\n", ""),
    "one buffer for all block sums": (SUM, "    current ^= 1;\n", ""),
    "no barrier in the reduction": ("reduce.cu", "  __syncthreads();\n", ""),
    "a warp's sum without its last step": (
        SUM,
        "lanes > 0; lanes /= 2",
        "lanes > 1; lanes /= 2",
    ),
    "one warp too few": (SUM, "< CLUSTER_WARPS; ++warp", "< CLUSTER_WARPS - 1; ++warp"),
    "a lane adds three shares of four": (
        SUM,
        "partial < PARTIALS; ++",
        "partial < PARTIALS - 1; ++",
    ),
    "the last four warps are left out": (
        SUM,
        "first < CLUSTER_WARPS)",
        "first < CLUSTER_WARPS - PARTIALS)",
    ),
    "lanes do not add": (SUM, "lanes = LANES / 2;", "lanes = 0;"),
    # loads ahead
    "gate and value of the first token are not loaded": (
        FORWARD,
        "{ load_ahead(token); }",
        "{ request(token, stage); }",
    ),
    "gate and value are those of the token before": (
        FORWARD,
        "scalars.prefetch(token);",
        "scalars.prefetch(token > 0 ? token - 1 : 0);",
    ),
    # bounds
    "threads beyond the last packet work": ("rewrite_read.cuh", "column_of(row) < WIDTH;", "true;"),
    "threads beyond the last slice's packets work": (
        "rewrite_read.cuh",
        "feature_of(row) < D;",
        "true;",
    ),
    "the last feature is left out": (
        "rewrite_read.cuh",
        "feature_of(row) < D;",
        "feature_of(row) < D - FEATURES;",
    ),
    "one token too many": (
        EARLIER,
        "token <= chunk.last; token += chunk.step) pass",
        "token <= chunk.last + chunk.step; token += chunk.step) pass",
    ),
    "the chunk's last token is left out": (
        "rewrite_read.cuh",
        "steps < args.chunk ? steps",
        "steps < args.chunk ? steps - 1",
    ),
    "blocks that take turns begin with the same token": (
        "rewrite_read.cuh",
        "args.chunk : blockIdx.x;",
        "args.chunk : 0;",
    ),
    "the next token is loaded from its neighbour": (FORWARD, "? token + chunk.step", "? token + 1"),
    "pieces of a packet overlap": (
        "rewrite_read.cuh",
        "(piece * PACKETS + packet",
        "(piece + packet",
    ),
    # halos and windows
    "a halo one token short": (
        EARLIER,
        "position < TAPS - 1 ? position : TAPS - 1",
        "position < TAPS - 2 ? position : TAPS - 2",
    ),
    "tokens behind the chunk count twice": (
        LATER,
        "pass.run(token, false);",
        "pass.run(token, true);",
    ),
    "the window does not move": (FORWARD, "earlier.advance();", ""),
    "sequences see each other": (EARLIER, "if (position == args.time) {", "if (false) {"),
    "sequences see each other backward": (
        LATER,
        "position = args.time - 1;\n      window.clear();",
        "position = args.time - 1;",
    ),
    "one token behind the chunk is not looked at": (
        LATER,
        "behind < TAPS - 1 ? behind : TAPS - 1",
        "behind < TAPS - 2 ? behind : TAPS - 2",
    ),
    "a chunk starts without the tokens before it": (
        "expand.cu",
        "load_x(packet, e.x, before, c, c.first - back, feature);",
        "packet.clear();",
    ),
    "an expansion looks one token too few behind": (
        "expand.cu",
        "behind = c.last + TAPS - 1",
        "behind = c.last + TAPS - 2",
    ),
    "an expansion's sequences see each other": ("expand.cu", " && token + i < c.end", ""),
    "expand_by_tap looks one token too far back": (
        "expand_by_tap.cuh",
        "token - tap - 1",
        "token - tap - 2",
    ),
    "expand_by_tap looks one token too far ahead": (
        "expand_by_tap.cuh",
        "token + SPAN + tap",
        "token + SPAN + tap + 1",
    ),
    "expand_by_tap's groups of taps overlap": (
        "expand_by_tap.cuh",
        "token - group, feature",
        "token - group + 1, feature",
    ),
    "expand_by_tap's sequences see each other": ("expand_by_tap.cuh", "token >= c.start && ", ""),
    # the cp.async pipeline
    "no cp_async_wait in the forward": (FORWARD, "ptx::cp_async_wait();", ";"),
    "no cp_async_wait in the backward": (BACKWARD, "ptx::cp_async_wait();", ";"),
    "a stage is overwritten while it is read": (
        "token_stream.cuh",
        "KEEP_IN_REGISTERS || STAGES != 1",
        "true",
    ),
    "two stages share memory": ("token_stream.cuh", "STAGES == 2 ? stage * STAGE_BYTES : 0", "0"),
    "stages do not alternate": (BACKWARD, "inputs.stage ^= 1;", ""),
    "rows of the current token are prefetched again": (
        BACKWARD,
        "prefetch(next, STAGES",
        "prefetch(token, STAGES",
    ),
    "rows of the chunk's first own token are not prefetched": (
        BACKWARD,
        "chunk.owns(next));",
        "false);",
    ),
    "scalars of the current token are prefetched again": (
        BACKWARD,
        "scalars.prefetch(next);",
        "scalars.prefetch(token);",
    ),
    "a lane broadcasts its neighbour's value": (
        "token_stream.cuh",
        "lane_value[i / 32], i % 32",
        "lane_value[0], i ^ 1",
    ),
    # clusters
    "no wait for the other blocks' sums": (
        SUM,
        "buffer.barriers[current].wait(parity);",
        "",
    ),
    "the mbarrier's parity does not change": (SUM, "parity ^= current;", ""),
    "fewer bytes are expected than sent": (
        SUM,
        "N * CLUSTER_WARPS * static",
        "N * WARPS * static",
    ),
    "sums are sent to blocks that have not begun": (SUM, "ptx::sync_cluster();", ""),
    "a block sends its sums to itself only": (
        SUM,
        "st_async(partial, block, sum)",
        "st_async(partial, block_rank(), sum)",
    ),
    "blocks overwrite each other's sums": (SUM, "block_rank() * WARPS + ", ""),
    "blocks of a cluster have one buffer for all sums": (
        SUM,
        """    parity ^= current;
#else
    __syncthreads();
#endif
    sum_partials(x);
    current ^= 1;
""",
        """    parity ^= 1;
#else
    __syncthreads();
#endif
    sum_partials(x);
    current ^= CLUSTER == 1;
""",
    ),
    "both buffers use one mbarrier": (SUM, "barriers[current].st_async", "barriers[0].st_async"),
    "the blocks of a cluster share a window": (
        "rewrite_read.cuh",
        "(blockIdx.x) * SLICES + blockIdx.y",
        "(blockIdx.x)",
    ),
    # indices and terms
    "channels and taps swapped": (
        "reduce.cu",
        "(i * M + j) * TAPS + tap",
        "(i * TAPS + tap) * M + j",
    ),
    "values read their neighbour's weight": (
        "rewrite_read.cuh",
        "static_cast<long long>(j) * D + feature",
        "static_cast<long long>(j) * D + feature + 1",
    ),
    "gamma is left out of the gate's gradient": (
        "reduce.cu",
        "(gate || !VALUE_FROM_COMPRESSED)",
        "!gate && !VALUE_FROM_COMPRESSED",
    ),
    "dk loses its multiple of k": (REWRITES, "+= grad.on_k * k[f]", "+= Real(0)"),
    "dk loses its multiples of the other k": (REWRITES, "on[n][i] * k[i][f]", "Real(0)"),
    "an earlier rewrite sees the whole G": (REWRITES, "grads[later].back[j];", "Real(0);"),
    "c is left out of dx in parameters_bwd": (SEPARATE, "dx[f] -= s.shift * x_hat[f]", ""),
    "tokens behind the chunk are summed, too": (
        SEPARATE,
        "    if (!own) return;\n    sums",
        "    sums",
    ),
    "slices leave a gap": (
        "rewrite_read.cuh",
        "(blockIdx.y) * WIDTH",
        "(blockIdx.y) * (WIDTH + FEATURES)",
    ),
    "the sums of X instead of X'": (SEPARATE, "if constexpr (REWRITE) {", "if constexpr (false) {"),
    "c is left out of g": (REWRITES, "k_grad[j] -= s.shift *", "k_grad[j] -= Real(0) *"),
    "eps_k is not squared": (FORWARD, "Real(args.eps_k) * Real(args.eps_k)", "Real(args.eps_k)"),
    "halves of a pair swapped": (
        "common.cuh",
        "high ? pair & 0xffff0000u : pair << 16",
        "high ? pair << 16 : pair & 0xffff0000u",
    ),
}
# Faults of rewrites that erase nothing; `erasing` notices them.
ERASES = {
    "beta is left out of the target": (
        "rewrite_read.cuh",
        ": mul_rn(gate, value[j])",
        ": value[j]",
    ),
    "d beta is that of the delta rule": (REWRITES, "? g_t : g_v", "? g_t : g_t"),
    "a later rewrite erases": (REWRITES, "s.rewrites[later].erasure()", "grads[later].scale"),
    "dk has what is not erased": (
        REWRITES,
        "if constexpr (ERASE == ERASE_NONE) continue;",
        "",
    ),
}
ROUNDINGS = {
    "the forward reads another X' than it stores": (
        FORWARD,
        "state[row].store_streaming(packet_of<M>(args.new_state, token, row));",
        """state[row].store_streaming(packet_of<M>(args.new_state, token, row));
    for (auto& each : state[row].element) each.bits ^= 1;""",
    ),
    "the forward goes on with an x that is not rounded": (EARLIER, "saved.get(x);", ";"),
    "the backward rounds X' towards zero": (
        "rewrite_read.cuh",
        "  new_state.set(x);",
        """  if (BACKWARD)
    for (Real& each : x) each = __uint_as_float(__float_as_uint(each) & 0xffff0000u);
  new_state.set(x);""",
    ),
}

# Faults of sequences that come in pieces or hold several documents; `pieces` notices them.
PIECES = {
    "what earlier calls left is not taken": (
        EARLIER,
        "if (position == 0) take_pending",
        "if (false) take_pending",
    ),
    "every sequence takes what the first one left": (
        EARLIER,
        "take_pending(token / args.time)",
        "take_pending(0)",
    ),
    "the sum of the last token is left": (
        EARLIER,
        "window.load(tap, row, sums.element);",
        "window.load(tap == 0 ? TAPS - 1 : tap - 1, row, sums.element);",
    ),
    "what is left goes to another sequence": (
        EARLIER,
        "leave_pending(token / args.time)",
        "leave_pending(0)",
    ),
    "documents see each other": (EARLIER, "if (starts) window.clear();", ""),
    "a document starts a token late": (
        EARLIER,
        "starts = starts_document(args, token + 1);",
        "starts = starts_document(args, token);",
    ),
    "documents see each other backward": (
        LATER,
        "pass.run(token, true);\n      if (starts) window.clear();",
        "pass.run(token, true);",
    ),
    "documents behind the chunk see each other": (
        LATER,
        "pass.run(token, false);\n      if (starts) window.clear();",
        "pass.run(token, false);",
    ),
    "an expansion's documents see each other": (
        "expand.cu",
        "if (starts[i]) past.clear();",
        "",
    ),
    "an expansion's documents see each other backward": (
        "expand.cu",
        "reach = starts ? 0 : reach",
        "reach = false ? 0 : reach",
    ),
    "an expansion's weight sees documents as one": ("expand.cu", "if (starts) past.clear();", ""),
    "an expansion's chunk begins with another document": (
        "expand.cu",
        "if (starts_document(e, c, c.first - back + 1)) visible = false;",
        "",
    ),
    "x of another document is left": (
        "expand.cu",
        "if (starts_document(e, c, token + 1)) visible = false;",
        "",
    ),
    "x is left a token late": ("expand.cu", "c.end - (TAPS - 1) + kept;", "c.end - TAPS + kept;"),
    "x that was left is not taken": (
        "expand.cu",
        "else if (before && kept >= 0)",
        "else if (false)",
    ),
    "expand_by_tap's documents see each other": (
        "expand_by_tap.cuh",
        "if (starts_document(e, c, token + i - tap)) visible[i] = false;",
        "",
    ),
    "expand_by_tap's documents see each other backward": (
        "expand_by_tap.cuh",
        "if (starts_document(e, c, token + i + tap + 1)) visible[i] = false;",
        "",
    ),
    "expand_by_tap's weight sees documents as one": (
        "expand_by_tap.cuh",
        "!DOCUMENTS || group + i <= reach",
        "true",
    ),
}

# Faults of token reads in tiles; `tiles` notices them.
TILES = {
    "no wait for a tile": (TILE, "    ring.wait();\n", ""),
    "a stage is refilled while it is read": (
        TILE,
        "    compare(tile, state, direction, rewrites);\n",
        "    ring.request(tile.ahead(STAGES), ring.stage);\n"
        "    compare(tile, state, direction, rewrites);\n",
        "    request(refill, stage);\n",
        "",
    ),
    "the ring's parity does not change": (TILE, "if (stage == 0) parity ^= 1;", ""),
    "fewer bytes of a tile are expected than copied": (
        TILE,
        "expect_tx(tile.end() * (STATE_BYTES + DIRECTION_BYTES))",
        "expect_tx(tile.end() * STATE_BYTES)",
    ),
    "the next tile but one is the next": (TILE, "tile.ahead(STAGES)", "tile.ahead(1)"),
    "tokens beyond the chunk are stored": (TILE, "t >= begin && t < left;", "t >= begin;"),
    "halo tokens are stored": (TILE, "t >= begin && t < left;", "t < left;"),
    "a tile's halo is one token short": (
        TILE,
        "static_cast<int>(before) : TAPS - 1;",
        "static_cast<int>(before) : TAPS - 2;",
    ),
    "every tile counts as plain": (TILE, "if (tile.is_whole() && window_starts == 0)", "if (true)"),
    "gates and values are those of the tile before": (
        TILE,
        "load_operands(tile.ahead(1));",
        "load_operands(tile);",
    ),
    "a lane gets its neighbour's sums": (TILE, "n * TILE + mine);", "n * TILE + (mine ^ 1));"),
    "a tile has one rstd": (TILE, "(FULL_MASK, rstd, t)", "(FULL_MASK, rstd, 0)"),
    "sequences within a tile see each other": (TILE, "starts = position == 0;", "starts = false;"),
    "positions of short sequences are too large": (TILE, "position %= time;", "position -= time;"),
    "documents within a tile see each other": (
        TILE,
        "starts |= starts_document(args, token);",
        "",
    ),
}


def tiles(kernels: Path = KERNELS) -> None:
    """Raise an exception if a token read in tiles is wrong."""
    gpu: dict[str, Any] = {"kernels": kernels, "shared_per_block": 227 << 10, "cluster": 8}
    for chunk, time in ((7, 11), (30, 2)):
        given = inputs((3, time), 128, 4) | parameters(128, 4, "token", 4)
        starts = MASKS["some"] if time == 11 else None
        for marks in (None, starts):
            with emulated(**gpu, plan={"CHUNK": chunk}):
                compare("rewrite_read", given, BF16, eps_k=0.1, document_starts=marks)


def pieces(kernels: Path = KERNELS) -> None:
    """Raise an exception if sequences in pieces, or of several documents, come out wrong."""
    starts, parts = MASKS["some"], [4, 1, 6]
    for plan in ({"CHUNK": 3}, {"CHUNK": 3, "SUMS": 3}):
        with emulated(kernels=kernels, plan=plan):
            given = read_arguments(4, 4)
            compare("rewrite_read", given, F64, eps_k=0.1, document_starts=starts)
    for marks in (None, starts):
        given, name = test_cached.case(F32, 4, 4), "rewrite_read"
        with emulated(kernels=kernels, plan={"CHUNK": 3}):
            actual = test_cached.in_pieces(given, name, parts, marks)
        known = given if marks is None else given | {"document_starts": marks}
        test_cached.assert_close(actual, test_cached.whole(known, name))
    for taps, keep in ((4, 1), (13, 0)):
        x, weight = test_cached.expansion(F64, 2, taps)
        assert weight is not None
        with emulated(kernels=kernels, plan={"CHUNK": 3, "KEEP_IN_REGISTERS": keep}):
            expansion = {"x": x, "weight": weight}
            compare("expand", expansion, F64, value_channels=2, document_starts=starts)
            states = [
                test_cached.expanded_in_pieces(x, weight, 2, parts, marks)
                for marks in (None, starts)
            ]
        for marks, state in zip((None, starts), states, strict=True):
            wanted = functional.expand(x, weight, value_channels=2, document_starts=marks)
            test_cached.assert_close([state], [wanted])


def erasing(kernels: Path = KERNELS) -> None:
    """Raise an exception if rewrites that erase nothing are wrong."""
    with emulated(kernels=kernels, plan={"CHUNK": 7}):
        for n in (None, 2):
            tensors = inputs((2, 9), 100, 4, n) | parameters(100, 4, "channel", rewrites=n)
            compare("rewrite_read", tensors, F64, eps_k=0.1, erase="none")


def sample(monkeypatch: pytest.MonkeyPatch, kernels: Path = KERNELS) -> None:
    """Raise an exception if the kernels are wrong."""
    for order in ("0", "1", "5"):
        monkeypatch.setenv("DDL_EMULATOR_ORDER", order)
        with emulated(kernels=kernels, plan={"CHUNK": 7, "THREADS": 64, "FEATURES": 1}):
            for compress in ("channel", "token"):
                tensors = inputs((2, 11), 100, 4) | parameters(100, 4, compress, 3)
                compare("rewrite_read", tensors, F64, eps_k=0.1)
            tensors = inputs((2, 5), 24, 2, 2) | parameters(24, 2, "channel", rewrites=2)
            compare("rewrite_read", tensors, F64, eps_k=0.1)
            x, weight = torch.randn(2, 11, 100, dtype=F64), torch.randn(100, 4, 3, dtype=F64)
            compare("expand", {"x": x, "weight": weight}, F64, value_channels=4)
        with emulated(kernels=kernels, plan={"CHUNK": 7, "THREADS": 64, "FEATURES": 1, "SUMS": 3}):
            tensors = inputs((2, 11), 100, 4) | parameters(100, 4, "token", 3)
            compare("rewrite_read", tensors, F64, eps_k=0.1)
        for window in (0, 2):
            plan = {"CHUNK": 7, "CLUSTER": 2, "WINDOW": window}
            with emulated(kernels=kernels, plan=plan):
                tensors = inputs((2, 11), 200, 4) | parameters(200, 4, "token", 3)
                compare("rewrite_read", tensors, F32, eps_k=0.1)
        with emulated(
            kernels=kernels, plan={"CHUNK": 7, "CLUSTER": 1, "FEATURES": 1, "THREADS": 384}
        ):
            tensors = inputs((2, 5), 400, 4) | parameters(400, 4, "channel")
            compare("rewrite_read", tensors, F32, eps_k=0.1)
        for stages in (1, 2):
            plan = {"CHUNK": 7, "THREADS": 32, "KEEP_IN_REGISTERS": 0, "STAGES": stages}
            with emulated(kernels=kernels, plan=plan):
                tensors = inputs((2, 11), 100, 4) | parameters(100, 4, "token", 3)
                compare("rewrite_read", tensors, F32, eps_k=0.1)
        with emulated(kernels=kernels, plan={"CHUNK": 7, "KEEP_IN_REGISTERS": 0}):
            x, weight = torch.randn(2, 11, 6, dtype=F64), torch.randn(6, 2, 13, dtype=F64)
            compare("expand", {"x": x, "weight": weight}, F64, value_channels=2)
        with emulated(kernels=kernels):
            tensors = inputs((2, 11), 64, 4) | parameters(64, 4, "channel")
            compare("rewrite_read", tensors, BF16, eps_k=0.1)
        with emulated(kernels=kernels, plan={"ORDER": 0, "SUMS": 1, "FEATURES": 8, "CHUNK": 7}):
            tensors = inputs((2, 11), 200, 1) | parameters(200, 1, "identity")
            compare("rewrite_read", tensors, BF16, eps_k=0.1)
            check_conversions(BF16, 64)


@pytest.mark.exhaustive
def test_the_kernels_pass(monkeypatch):
    sample(monkeypatch)
    pieces()
    erasing()
    tiles()


def a_few(mutants: dict[str, tuple[str, ...]]) -> list[Any]:
    """The names; `make test` has a few of them, because each is compiled anew."""
    return [
        pytest.param(name, marks=[pytest.mark.exhaustive] if number % 24 else [])
        for number, name in enumerate(mutants)
    ]


@pytest.mark.parametrize("name", a_few(PIECES))
def test_a_mutant_in_pieces_does_not(name, tmp_path):
    mutant = plant(PIECES[name], tmp_path / "kernels")
    noticed = in_a_child(lambda: pieces(mutant))
    assert noticed, "the pieces passed"
    assert "did not compile" not in noticed


@pytest.mark.parametrize("name", a_few(TILES))
def test_a_mutant_in_tiles_does_not(name, tmp_path):
    mutant = plant(TILES[name], tmp_path / "kernels")
    noticed = in_a_child(lambda: tiles(mutant))
    assert noticed, "the tiles passed"
    assert "did not compile" not in noticed


@pytest.mark.parametrize("name", a_few(ERASES))
def test_a_mutant_that_erases_does_not(name, tmp_path):
    mutant = plant(ERASES[name], tmp_path / "kernels")
    noticed = in_a_child(lambda: erasing(mutant))
    assert noticed, "the rewrites passed"
    assert "did not compile" not in noticed


@pytest.mark.parametrize("name", a_few(MUTANTS))
def test_a_mutant_does_not(name, monkeypatch, tmp_path):
    mutant = plant(MUTANTS[name], tmp_path / "kernels")
    noticed = in_a_child(lambda: sample(monkeypatch, mutant))
    assert noticed, "the sample passed"
    assert "did not compile" not in noticed


@pytest.mark.table(0)
@pytest.mark.parametrize("name", ROUNDINGS)
def test_a_rounding_at_the_wrong_place_is_noticed(name, tmp_path):
    mutant = plant(ROUNDINGS[name], tmp_path / "kernels")
    noticed = in_a_child(lambda: check_bits(BF16, 4, "token", mutant))
    assert noticed.startswith("AssertionError"), noticed or "test_exact passed"


def plant(fault: tuple[str, ...], to: Path) -> Path:
    """Copy the kernels with a fault: (file, right text, wrong text, more of both)."""
    file, *texts = fault
    mutant = shutil.copytree(KERNELS, to)
    text = (mutant / file).read_text(encoding="utf-8")
    for right, wrong in zip(texts[::2], texts[1::2], strict=True):
        assert right in text, f"{file} has changed: find the mutant a new place"
        text = text.replace(right, wrong)
    (mutant / file).write_text(text, encoding="utf-8")
    return mutant


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def in_a_child(work: Callable[[], None]) -> str:
    """Run `work` in a forked process, as mutants may corrupt memory; return its error or ""."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the parent's threads do not exist in a fork
        faulthandler.disable()  # some mutants are meant to crash
        try:
            work()
        except (AssertionError, RuntimeError) as error:
            os.write(writer, f"{type(error).__name__}: {error}"[:4096].encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8", errors="replace") as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return said or (f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else "")
