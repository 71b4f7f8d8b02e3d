"""The screen of `ddl explore`, by the characters that it shows."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from pathlib import Path

import pytest

from ddl.lab.analysis.inspection import inspect
from ddl.lab.explore.pages import PAGES
from ddl.lab.explore.screen import HELP, Explorer
from ddl.lab.explore.watching import Watch
from ddl.lab.train.runs import load_config
from tests.lab.analysis.cases import make_run
from tests.lab.explore.conftest import append, copied
from tests.lab.explore.driver import Driver, explore
from tests.support import hf_cases

TABS = ("Runs", *(page.title for page in PAGES))


def additive(path: Path) -> Path:
    """A finished run without recordings, samples and inspection."""
    return make_run(path, "additive", [3.0, 2.5], log_every=1)


def test_every_tab_of_a_run(run: Path) -> None:
    async def script(screen: Driver) -> None:
        text = await screen.sees("cc", "finished")
        assert re.search(r"run +residual +step +val. loss +state", text)
        assert re.search(r"cc +ddl-cc +6/6 +\d\.\d{4} +finished", text)
        assert str(run) in text.replace("\n", "")  # of the run under the cursor
        text = await screen.press("2")
        assert "[loss] perplexity" in text
        assert re.search(r"^a cc \d\.\d+$", text, flags=re.MULTILINE)
        assert "┤" in text
        assert re.search(r"[\u2801-\u28ff]", text)
        text = await screen.press("3")
        assert "cc, 1 of 1, finished" in text
        assert "[depth] β  error  write norm  spectra  survival  coherence  lens" in text
        assert re.search(r"1 mlp +\d\.\d\d ±\d\.\d\d ", text)
        text = await screen.press("4")
        assert "A comparison needs two runs, and here is no second one." in text
        text = await screen.press("5")
        assert text.index("step 6") < text.index("step 3")  # the newest first
        text = await screen.press("6")
        assert re.search(r"^  model.residual +ddl-cc", text, flags=re.MULTILINE)
        assert re.search(r"^\* model.vocab_size +256", text, flags=re.MULTILINE)

    explore([run], script)


def test_the_views_of_inside(run: Path) -> None:
    recorded = [json.loads(line) for line in (run / "recordings.jsonl").read_text().splitlines()]
    inspection = json.loads((run / "inspect" / "inspection.json").read_text())

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        for view, quantity in (
            ("β", "beta"),
            ("error", "error"),
            ("write norm", "write_norm"),
        ):
            text = await screen.press(*(("3", "v") if view == "β" else ("v",)))
            assert f"[{view}]" in text
            assert re.search(r"^ {7}\s*3 +6$", text, flags=re.MULTILINE)  # the recorded steps
            means = [record["sublayers"][1][quantity]["mean"] for record in recorded]
            cells = " +".join(re.escape(f"{mean:#.3g}") for mean in means)
            assert re.search(rf"^0 mlp +{cells}$", text, flags=re.MULTILINE)
        text = await screen.press("v")
        shares = inspection["sublayers"][1]["regimes"].values()
        cells = " +".join(f"{share:.0%}" for share in shares)
        assert re.search(rf"^0 mlp +{cells}$", text, flags=re.MULTILINE)
        medians = ", ".join(f"{value:#.3g}" for value in inspection["singular_values"][1])
        assert f"(medians over tokens; all others are 1): {medians}." in " ".join(text.split())
        text = await screen.press("v")
        row = " +".join(f"{share:.0%}" for share in inspection["survival"][0])
        assert re.search(rf"^embedding +{row}$", text, flags=re.MULTILINE)
        second = " +".join(f"{share:.0%}" for share in inspection["survival"][2][2:])
        assert re.search(rf"^0 mlp +· +· +{second}$", text, flags=re.MULTILINE)
        text = await screen.press("v")
        cells = " +".join(f"{cosine:.2f}" for cosine in inspection["coherence"][1])
        assert re.search(rf"^0 mlp +{cells}$", text, flags=re.MULTILINE)
        text = await screen.press("v")
        assert "[lens]" in text
        assert re.search(r"^1 mlp +'.*' \d+%", text, flags=re.MULTILINE)
        assert "[depth]" in await screen.press("v")  # round again
        assert "[lens]" in await screen.press("V")

    explore([run], script)


def test_curves_of_other_quantities(run: Path) -> None:
    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        await screen.press("2")
        for view in ("perplexity", "bits/byte", "mean β", "grad norm", "lr", "tokens/s", "mfu"):
            text = await screen.press("v")
            assert f"[{view}]" in text
            assert re.search(r"^a cc \S+$", text, flags=re.MULTILINE), view
            assert re.search(r"[\u2801-\u28ff]", text), view
        linear = await screen.press("1", "2", *"vv")
        assert linear != await screen.press("l")
        assert linear == await screen.press("l")

    explore([run], script)


def test_curves_over_tokens_flops_and_seconds(run: Path) -> None:
    """A run without seconds is named, and the axis ends where the costs of the run do."""
    other = additive(run.parent / "untimed")
    lines = (other / "metrics.jsonl").read_text().replace("tokens_per_second", "speed")
    (other / "metrics.jsonl").write_text(lines)
    config = load_config(run)
    seconds = [json.loads(line).get("seconds") for line in (run / "metrics.jsonl").open()]
    last = max(filter(None, seconds))

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        by_step = await screen.press("2")
        assert "interpolated" not in by_step
        for label, end in (("tokens", 6 * config.tokens_per_step), ("FLOPs", None)):
            text = " ".join((await screen.press("o")).split())
            assert f"Over {label}. Between points a curve is interpolated." in text
            if end is not None:
                assert f" {end // 500 * 500 / 1000:g}k" in text or f" {end // 500 * 500}" in text
        text = await screen.press("o")
        assert "Over seconds of training." in text
        assert "Without seconds of training: untimed" in text
        ticks = [float(number) for number in text.splitlines()[-2].split()]
        assert 0 < max(ticks) <= last
        assert await screen.press("o") == by_step

    explore([run.parent], script)


def test_a_comparison_of_the_marked_runs(run: Path) -> None:
    additive(run.parent / "add")
    copied(run, run.parent / "cc2")

    async def script(screen: Driver) -> None:
        await screen.sees("add", "cc2")
        text = await screen.press("4")
        assert re.search(r"^run +step +val. loss +best", text, flags=re.MULTILINE)
        assert [name for name in ("add", "cc", "cc2") if f"\n{name} " in text] == [
            "add",
            "cc",
            "cc2",
        ]
        text = await screen.press("1", "down", "space", "down", "space", "4")
        assert "\nadd " not in text
        assert "\ncc2 " in text
        assert "`runs` must have each seed of a variant once" in await screen.press("v")
        assert "\nadd " in await screen.press("v", "a", "a")  # all, then none, which shows all
        text = await screen.press("2")
        assert re.search(r"^a add 2.500 +b cc \d\.\d+ +c cc2 ", text, flags=re.MULTILINE)
        text = await screen.press("6", "v")
        assert re.search(r"^option +add +cc +cc2$", text, flags=re.MULTILINE)
        assert re.search(r"^model.residual +additive +ddl-cc +ddl-cc$", text, flags=re.MULTILINE)

    explore([run.parent], script, size=(100, 30))


def test_the_inside_of_an_additive_run(tmp_path: Path) -> None:
    path = additive(tmp_path / "add")
    found = inspect(hf_cases.model(residual="additive"), [hf_cases.tokens(1, 8)])
    (path / "inspect").mkdir()
    (path / "inspect" / "inspection.json").write_text(json.dumps(found.summary()))
    append(path, {"step": 6, **found.recording.summary()}, name="recordings.jsonl")

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        text = await screen.press("3")
        assert re.search(r"sublayer +write +\|X\| +cosine +share", text)
        assert "There is no β to show: this residual adds" in await screen.press("v")
        assert "There is no error to show" in await screen.press("v")
        assert "Norm of the write over training" in await screen.press("v")
        assert "There is no spectrum to show" in await screen.press("v")
        assert "All writes survive whole" in await screen.press("v")
        assert "between what two sublayers add" in await screen.press("v")
        assert "No samples: `ddl train --sample-every N` writes them." in await screen.press("5")
        assert "Without: add" in await screen.press("2", "v", "v", "v")  # no mean β

    explore([path], script)


def test_a_run_without_recordings_and_inspection(run: Path) -> None:
    (run / "recordings.jsonl").unlink()
    shutil.rmtree(run / "inspect")

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        assert "No inspection: `ddl inspect RUN` makes one" in await screen.press("3")
        assert "No recordings: `ddl train --record-every N` writes them." in await screen.press("v")

    explore([run], script)


# --- live -----------------------------------------------------------------------------------------


def test_it_follows_a_run_that_trains(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:2]))
    shutil.rmtree(run / "checkpoints")  # the last step is saved

    async def script(screen: Driver) -> None:
        await screen.sees("2/6", "training")
        append(run, {"step": 3, "validation_loss": 1.25}, end="")
        assert "1.2500" not in await screen.look()  # half a line
        append(run, end="\n")
        await screen.sees("3/6", "1.2500")
        await screen.press("5")
        append(run, {"step": 4, "sample": "once upon"})
        await screen.sees("step 4", "once upon")
        await screen.press("2")
        append(run, {"step": 5, "validation_loss": 1.125})
        await screen.sees("a cc 1.125")
        await screen.press("question_mark")  # files go on while the help is shown
        append(run, {"step": 6, "validation_loss": 1.0})
        await screen.look()
        assert re.search(r"^a cc 1.000$", await screen.press("escape"), flags=re.MULTILINE)

    explore([run], script)


def test_runs_appear_and_vanish(run: Path) -> None:
    async def script(screen: Driver) -> None:
        await screen.sees("cc")
        copied(run, run.parent / "later")
        await screen.sees("later")
        await screen.press("down", "3")
        assert "later, 2 of 2" in screen.text
        shutil.rmtree(run)
        await screen.sees("later, 1 of 1")
        shutil.rmtree(run.parent / "later")
        how = "`ddl train tiny --out runs/tiny` makes one in seconds."
        await screen.sees(f"There is no run yet; {how}")
        for tab in "123456":
            await screen.press(tab)
        await screen.press("n", "p", "space", "a", "1")
        assert f"No run in {run.parent} yet." in screen.text.replace("\n", "")

    explore([run.parent], script, size=(120, 24))


def test_nothing_is_said_of_runs_before_they_are_read(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of many runs, or a slow disk, takes a while."""
    go, poll = threading.Event(), Watch.poll
    monkeypatch.setattr(Watch, "poll", lambda self: go.wait(60) and poll(self))

    async def script(screen: Driver) -> None:
        try:
            for tab in "123456":
                text = await screen.press(tab)
                assert "The runs are being read." in text
                assert "no run" not in text.lower()
                assert "no second one" not in text
        finally:
            go.set()
        await screen.press("1")
        await screen.sees("cc", "finished")
        assert "being read" not in screen.text

    explore([run.parent], script)


def test_the_cursor_stays_with_its_run(run: Path) -> None:
    copied(run, run.parent / "zz")

    async def script(screen: Driver) -> None:
        await screen.sees("zz")
        await screen.press("down")
        append(run, {"step": 7, "validation_loss": 1.75})
        copied(run, run.parent / "aa")
        await screen.sees("aa", "1.7500")
        assert "zz, 3 of 3" in await screen.press("3")

    explore([run.parent], script)


# --- what cannot be read --------------------------------------------------------------------------


def test_damaged_files_are_named_and_the_rest_is_shown(run: Path) -> None:
    append(run, name="metrics.jsonl", end="nonsense\n[]\n")
    append(run, {"step": 9}, name="recordings.jsonl")
    (run / "inspect" / "inspection.json").write_text('{"format": 1}')
    (run / "eval-20261123-101500.json").write_text("{}")

    async def script(screen: Driver) -> None:
        last = "`runs` must have evaluations of `ddl eval`"
        shown = [await screen.sees("finished", last)]
        await screen.press("3", "v")
        shown.append(await screen.sees("0 mlp", last))
        for text in shown:
            flat = " ".join(text.split())
            assert "metrics.jsonl must be lines of JSON with a step each, got others: lines" in flat
            assert "recordings.jsonl must be lines of JSON with a step each" in flat
            assert "inspection.json must be an inspection of `ddl inspect`, got none with" in flat
        assert re.search(r"^0 mlp +\d", shown[1], flags=re.MULTILINE)

    explore([run], script, size=(160, 40))


@pytest.mark.table(0)
@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ("{", "its config.json cannot be read"),
        ('{"model": {"residual": "x"}}', "got 'x'"),
        (None, "lost its config.json"),
    ],
)
def test_a_damaged_configuration(run: Path, config: str | None, sentence: str) -> None:
    file = run / "config.json"
    file.unlink()
    if config is not None:
        file.write_text(config)

    async def script(screen: Driver) -> None:
        text = await screen.sees("damaged")
        assert sentence in text.replace("\n", " ")
        for tab in "23456":
            await screen.press(tab)
        assert "│" in await screen.press("2")  # its curves are still there
        assert sentence in (await screen.press("6")).replace("\n", " ")

    explore([run.parent], script)


def test_markup_and_control_characters_are_text(run: Path) -> None:
    evil = "[red]x[/red] \x1b[31m \u202e <b> \ud800 [@click=quit]go[/]"
    append(run, {"step": 6, "sample": evil})
    name = "[bold]b \x1b]0;t\x07\rc\x08\x9b6n\x85\x7f\u2066"
    os.rename(run, run.parent / name)

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        flat = "".join(screen.text.split())  # a long path is wrapped anywhere
        assert "[bold]b\ufffd]0;t\ufffd\ufffdc" in flat
        text = await screen.press("5")
        assert "[red]x[/red] \ufffd[31m \ufffd <b> \ufffd [@click=quit]go[/]" in text
        for tab in "123456":
            text = await screen.press(tab)
            assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\u2066\ud800]", text)
        assert "[bold]b" in await screen.press("2")

    explore([run.parent], script)


# --- keys and sizes -------------------------------------------------------------------------------


def test_keys_and_their_help(run: Path) -> None:
    async def script(screen: Driver) -> None:
        text = await screen.sees("finished", "? Help", "q Quit")
        assert "Log" not in text.splitlines()[-1]
        last = (await screen.press("2")).splitlines()[-1]
        assert last.strip() == (
            "n Next run  p Previous  space Mark  v View  l Log  s Smooth  ? Help  q Quit"
        )
        await screen.press("s")
        assert not screen.app.smooth
        text = await screen.press("question_mark")
        assert "space     mark the run, or take its mark away" in text
        assert "space     mark" not in await screen.press("escape")
        await screen.press("q")

    explore([run], script, size=(80, 30))
    keys = {key for b in Explorer.BINDINGS for key in b.key.split(",")}  # type: ignore[union-attr]
    for key in keys - {"ctrl+c"} - set("23456"):
        shown = {"question_mark": "?", "1": "1 … 6"}.get(key, key)
        assert re.search(rf"^{re.escape(shown)}|^\w  {shown} ", HELP, flags=re.MULTILINE), key


@pytest.mark.table(0)
@pytest.mark.parametrize("size", [(80, 24), (30, 6), (4, 2)])
def test_every_tab_in_every_size(run: Path, size: tuple[int, int]) -> None:
    additive(run.parent / f"a-rather-long-name-{'of-a-run-' * 6}")

    async def script(screen: Driver) -> None:
        await screen.look()
        for tab, name in enumerate(TABS, start=1):
            await screen.press(str(tab))
            for keys in ((), ("v",), ("v", "v", "v")):
                lines = (await screen.press(*keys)).splitlines()
                assert len(lines) <= size[1]
                assert all(len(line) <= size[0] for line in lines), name
        text = await screen.resize(80, 24)
        assert "6 Config" in text

    explore([run.parent], script, size=size)


def test_eighty_columns_show_every_number_of_the_table_over_depth(run: Path) -> None:
    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        text = await screen.press("3")
        assert re.search(r"share  mostly$", text, flags=re.MULTILINE)
        assert "▁" not in text  # a bar to scroll with

    explore([run], script)


@pytest.mark.exhaustive
def test_without_colour_the_text_is_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: dict[bool, list[str]] = {}

    async def script(screen: Driver) -> None:
        await screen.sees("finished")
        shown[screen.app.no_color] = [await screen.press(tab) for tab in "123456"]

    explore([run], script)
    monkeypatch.setenv("NO_COLOR", "1")
    explore([run], script)
    assert shown[True] == shown[False]
