"""`ddl.lab.analysis.compare`: what is read from runs, and what makes a comparison unfair."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddl.errors import InputError
from ddl.lab.analysis import tables
from ddl.lab.analysis.compare import Comparison, compare, plot, unique_names
from ddl.lab.analysis.document import document
from ddl.lab.analysis.runs import Run, read_run
from ddl.lab.config import OptimConfig
from ddl.lab.config.paper_tasks import metric_of
from ddl.lab.train import train
from ddl.lab.train.runs import load_config
from ddl.models import GPT
from ddl.models.tokenizers import CharTokenizer, describe
from tests.lab.analysis.cases import make_run, write_evaluation
from tests.lab.analysis.papers import ONE_SHOT, PERPLEXITIES, ZERO_SHOT
from tests.support.train_cases import quiet, short, stop_at


def only(path: Path) -> Run:
    """The one run of a comparison."""
    compared = compare([path])
    assert compared.notes == []
    return compared.runs[0]


@pytest.mark.parametrize("residual", ["mhc", "independent-hc", "gated", "attention-residual"])
def test_other_streams_are_compared(tmp_path: Path, residual: str) -> None:
    base, other = make_run(tmp_path / "a"), make_run(tmp_path / "b", residual, losses=[2.0])
    compared = compare([base, other])
    assert [run.options.model.residual for run in compared.runs] == ["additive", residual]
    assert compared.runs[1].parameters == GPT(compared.runs[1].options.model).num_parameters()
    assert compared.runs[1].final.loss == 2.0


# --- one run ------------------------------------------------------------------------------------


def test_the_figures_of_a_run(tmp_path: Path) -> None:
    run = only(make_run(tmp_path / "a", "ddl-cc", [3.0, 2.0, 2.5]))
    assert run.name == "a"
    assert run.step == 6
    assert run.final == (6, 2.5)
    assert run.best == (4, 2.0)
    assert run.finished
    assert run.bits_per_byte == 2.5 * 1.5
    assert run.tokens_per_second == 2000.0  # the median of 1000, 2000 and 3000
    assert run.peak_memory == 10**9
    assert run.parameters == GPT(short(tmp_path, "ddl-cc").model).num_parameters()
    assert run.evaluations == ()


def test_a_trained_run_is_read_without_torch(tmp_path: Path) -> None:
    """Which takes seconds to import; its checkpoint says how many parameters there are."""
    config = short(tmp_path, "ddl-cc", out=tmp_path / "cc")
    train(config, quiet())
    code = (
        "import sys; from ddl.lab.cli import main; status = main(sys.argv[1:])\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    command = [sys.executable, "-c", code, "compare", str(config.out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["runs"]
    assert found["parameters"] == GPT(config.model).num_parameters()


@pytest.mark.parametrize("loss", PERPLEXITIES)
def test_the_papers_perplexities(tmp_path: Path, loss: float) -> None:
    digits = len(str(loss)) - 2
    run = only(make_run(tmp_path / "a", losses=[loss]))
    assert run.final is not None
    tolerance = 18 * 0.5 * 10**-digits + 1e-4  # of a loss that is rounded
    assert run.final.perplexity == pytest.approx(PERPLEXITIES[loss], abs=tolerance)


@pytest.mark.parametrize("model", ONE_SHOT)
def test_the_papers_averages(tmp_path: Path, model: str) -> None:
    tables = {1: ONE_SHOT} | ({0: ZERO_SHOT} if model in ZERO_SHOT else {})
    write_evaluation(tmp_path / "a", {shots: t[model].by_task() for shots, t in tables.items()})
    run = only(make_run(tmp_path / "a", overwrite=True))
    for evaluation in run.evaluations:
        row = tables[evaluation.shots][model]
        assert evaluation.scores == pytest.approx(row.by_task())
        assert evaluation.average == pytest.approx(row.average, abs=0.005 + 1e-9)
        metrics = {task: evaluation.metrics[task] for task in ("sciq", "winogrande")}
        assert metrics == {"sciq": "acc_norm", "winogrande": "acc"}


def test_without_one_of_the_eight_tasks_there_is_no_average(tmp_path: Path) -> None:
    scores = ONE_SHOT["small additive"].by_task()
    del scores["piqa"]
    write_evaluation(tmp_path / "a", {1: scores | {"capitals": 40.0}})
    (evaluation,) = only(make_run(tmp_path / "a", overwrite=True)).evaluations
    assert evaluation.average is None
    assert evaluation.scores["capitals"] == 40.0


def test_the_newest_evaluation_counts(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    write_evaluation(run, {0: {"piqa": 60.0}}, name="eval-20261123-235959.json")
    write_evaluation(run, {0: {"piqa": 70.0}}, name="eval-20261124-000000.json", limit=8)
    compared = compare([run])
    assert compared.runs[0].evaluations[0].scores == {"piqa": 70.0}
    assert compared.notes == ["Scored on the first 8 examples of each task only: a."]


def test_a_task_with_another_metric_shows_its_first(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    file = write_evaluation(run, {None: {"wiki": 1.0}})
    record = json.loads(file.read_text())
    words = {"alias": "wiki", "word_perplexity_stderr,none": "N/A", "word_perplexity,none": 30.5}
    record["runs"][0]["results"] = {"wiki": words, "group": {"alias": "group", " ": " "}}
    file.write_text(json.dumps(record))
    (evaluation,) = only(run).evaluations
    assert evaluation == (None, None, {"wiki": 30.5}, {"wiki": "word_perplexity"})


def test_an_exported_model_has_its_evaluation(tmp_path: Path) -> None:
    write_evaluation(tmp_path / "hf", {0: {"piqa": 60.0}})
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "ddl"}')
    run = only(tmp_path / "hf")
    assert (run.config, run.final, run.parameters) == (None, None, 123)
    assert run.evaluations[0].scores == {"piqa": 60.0}


def test_null_nan_and_huge_numbers(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a", losses=[3.0, None, 2.0])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "validation_loss": NaN, "tokens_per_second": null}\n')
        file.write(f'{{"step": 6, "peak_memory": 1{"0" * 400}, "tokens_per_second": "x"}}\n')
        file.write('{"step": 7, "validation_loss": 1.0')  # half a line
    run = compare([path]).runs[0]
    assert run.final is not None
    assert math.isnan(run.final.loss)
    assert run.best == (6, 2.0)
    assert (run.step, run.peak_memory, run.bits_per_byte) == (6, 10**9, None)
    assert not run.finished
    plot(compare([path]), tmp_path / "plot.png")


@pytest.mark.parametrize(
    "line",
    ["nonsense", "3", '{"loss": 1.0}', '{"step": "1"}', "[" * 100_000,
     '{"step": true}', '{"step": 1000000000000001}', '{"step": 1%s}' % ("0" * 400)],
)  # fmt: skip
def test_a_line_that_is_no_record(tmp_path: Path, line: str) -> None:
    path = make_run(tmp_path / "a")
    with (path / "metrics.jsonl").open("a") as file:
        file.write(line + "\n")
    expected = f"`{path}/metrics.jsonl` must be lines of JSON with a step each, got line 3"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}"):
        compare([path])


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"runs": 3}', '{"runs": [{}]}', '{"runs": ["results"]}',
     '{"runs": [{"results": null}]}', '{"runs": [{"results": []}]}',
     '{"runs": [{"results": {"sciq": "x"}}]}', '{"limit": [], "runs": [{"results": {}}]}',
     '{"limit": "<b>", "runs": []}', '{"runs": [{"num_fewshot": "x", "results": {}}]}'],
)  # fmt: skip
def test_a_damaged_evaluation(tmp_path: Path, text: str) -> None:
    path = make_run(tmp_path / "a")
    (path / "eval-1.json").write_text(text)
    expected = f"`runs` must have evaluations of `ddl eval`, got {path}/eval-1.json"
    with pytest.raises(InputError, match=f"^{re.escape(expected)}$"):
        compare([path])


@pytest.mark.parametrize("score", ["NaN", "1e400", "1e300", "true", '"x"', "null"])
def test_a_score_that_is_none_is_left_out(tmp_path: Path, score: str) -> None:
    path = make_run(tmp_path / "a")
    results = f'{{"sciq": {{"acc,none": {score}}}, "piqa": {{"acc,none": 0.5}}}}'
    (path / "eval-1.json").write_text(f'{{"runs": [{{"num_fewshot": 0, "results": {results}}}]}}')
    compared = compare([path])
    assert compared.runs[0].evaluations[0].scores == {"piqa": 50.0}
    json.dumps(document(compared), allow_nan=False)
    tables.show(compared, quiet())


def test_a_model_that_no_machine_holds(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a")
    config = json.loads((path / "config.json").read_text())
    config["model"] |= {"hidden_size": 10**9, "num_heads": 1}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"^`runs` must have models that a machine can hold, got"):
        compare([path])


def test_a_run_that_diverged_is_not_merely_unfinished(tmp_path: Path) -> None:
    lost, other = make_run(tmp_path / "lost", losses=[]), make_run(tmp_path / "other", losses=[])
    with (lost / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "diverged": "the loss is not finite at step 3"}\n')
    compared = compare([lost, other])
    assert compared.notes[-2:] == [
        "Diverged: lost (at step 3 of 6).", "Not finished: other (0 of 6 steps).",
    ]  # fmt: skip


def test_what_is_no_run(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(
            InputError, match=r"^`runs` must be a run directory of `ddl train`, a H"
        ):
            compare([path])


def test_the_step_of_a_run_that_was_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is saved after its last step, which is recorded only if the step has a record."""
    config = short(tmp_path, "additive", steps=9, log_every=2, eval_every=9)
    stop_at(3, monkeypatch)
    train(config, quiet())
    records = (config.directory / "metrics.jsonl").read_text().splitlines()
    assert json.loads(records[-1])["step"] == 2
    compared = compare([config.directory])
    assert compared.runs[0].step == 3
    assert compared.notes == [f"Not finished: {compared.runs[0].name} (3 of 9 steps)."]


# --- several runs -------------------------------------------------------------------------------


def test_a_directory_stands_for_its_runs(tmp_path: Path) -> None:
    for name in ("b-s10", "b-s2", "a-s1"):
        make_run(tmp_path / "sweep" / name)
    (tmp_path / "sweep" / "notes").mkdir()
    assert names(compare([tmp_path / "sweep"])) == ["a-s1", "b-s2", "b-s10"]
    (tmp_path / "sweep" / "sweep.json").write_text('{"runs": ["b-s2", "gone", "b-s10"]}')
    assert names(compare([tmp_path / "sweep"])) == ["b-s2", "b-s10", "a-s1"]
    for damaged in ("[]", "{", '{"runs": 3}', '{"runs": [3]}'):
        (tmp_path / "sweep" / "sweep.json").write_text(damaged)
        assert names(compare([tmp_path / "sweep"])) == ["a-s1", "b-s2", "b-s10"]


def test_a_directory_stands_for_the_runs_of_its_sweeps(tmp_path: Path) -> None:
    for name in ("tiny", "sweep/b-s1", "sweep/a-s1", "sweep/deeper/c-s1"):
        make_run(tmp_path / name)
    (tmp_path / "sweep" / "sweep.json").write_text('{"runs": ["b-s1", "a-s1"]}')
    assert names(compare([tmp_path])) == ["b-s1", "a-s1", "tiny"]
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert names(compare([tmp_path])) == ["b-s1", "a-s1", "tiny"]


def names(compared: Comparison) -> list[str]:
    return [run.name for run in compared.runs]


def test_the_same_directory_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a")
    (tmp_path / "link").symlink_to(run)
    compared = compare([run, tmp_path / "link", tmp_path / "." / "a"])
    assert names(compared) == ["a"]
    assert compared.notes == ["link, a named twice, shown once."]


def test_names_are_as_long_as_it_takes_to_tell_them_apart() -> None:
    paths = [Path(p) for p in ("/x/one/a", "/x/two/a", "/x/two/b", "/y/two/a")]
    assert unique_names(paths) == ["one/a", "x/two/a", "b", "y/two/a"]
    assert unique_names([Path(os.fsdecode(b"/x/\xff\x1b"))]) == ["\ufffd\ufffd"]


FAIR = "Not a fair comparison with first: second"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"steps": 12}, "with 12 steps, not 6"),
        ({"batch_size": 4, "eval_batches": 4}, "with 4 × 32 tokens per step, not 8 × 32"),
        ({"batch_size": 4, "accumulation": 2, "eval_batches": 4}, None),
        ({"data": "other"}, "with the data other, not topics"),
        ({"eval_batches": 0}, "validated on all windows, not 16"),
        ({"seed": 3, "optim": OptimConfig(lr=0.1), "precision": "bfloat16"}, None),
        (
            {"steps": 12, "accumulation": 3},
            "with 24 × 32 tokens per step, not 8 × 32; with 12 steps, not 6",
        ),
    ],
)
def test_what_makes_a_comparison_unfair(
    tmp_path: Path, changes: dict[str, Any], reason: str | None
) -> None:
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second", **changes)]
    assert compare(runs).notes == ([] if reason is None else [f"{FAIR} {reason}."])


def test_another_vocabulary(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "first"), make_run(tmp_path / "second")]
    (runs[1] / "tokenizer.json").write_text(json.dumps(describe(CharTokenizer("ab"))))
    reason = "with another vocabulary, so compare bits per byte and not the losses per token"
    assert compare(runs).notes == [f"{FAIR} {reason}."]


def test_the_same_path_with_other_data(tmp_path: Path) -> None:
    """The checkpoints have a checksum of the data; the path alone does not tell."""
    text = tmp_path / "text.txt"
    paths = []
    for name in ("first", "second"):
        text.write_text(f"The delta rule of the {name} text erases what it overwrites. " * 50)
        config = short(tmp_path, "additive", steps=1, out=tmp_path / name, data=str(text))
        paths.append(train(config, quiet()).run.path)
    assert compare(paths).notes == [f"{FAIR} with other data."]
    assert compare([paths[0], paths[0]]).runs[0].data is not None


def test_many_runs_have_one_sentence(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "first")]
    runs += [make_run(tmp_path / f"r{number}", steps=12) for number in range(8)]
    (note,) = compare(runs).notes
    assert "r0, r1, r2, r3 and 4 more with 12 steps, not 6." in note


def test_models_without_any_figure_are_named(tmp_path: Path) -> None:
    """The tables would be empty, and nothing printed."""
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"model_type": "llama"}')
    paths = [tmp_path / "a", tmp_path / "b"]
    expected = "No scores of a, b: `ddl eval` leaves them in the directory."
    assert compare(paths).notes == [expected]
    assert tables.markdown(compare(paths)) == re.sub(r"([`])", r"\\\1", expected)
    write_evaluation(paths[1], {0: {"piqa": 60.0}})
    assert compare(paths).notes == []


def test_runs_that_go_on(tmp_path: Path) -> None:
    started, halfway = make_run(tmp_path / "started", losses=[]), make_run(tmp_path / "halfway")
    config = load_config(halfway)
    (halfway / "config.json").unlink()
    make_run(halfway, steps=12, overwrite=True)
    lines = (halfway / "metrics.jsonl").read_text().replace('"step": 12', '"step": 5')
    (halfway / "metrics.jsonl").write_text(lines)
    assert config.steps == 6
    compared = compare([halfway, started])
    assert compared.runs[0].final == (5, 2.5)
    assert compared.runs[1].final is None
    expected = "Not finished: halfway (5 of 12 steps), started (0 of 6 steps)."
    assert compared.notes[-1] == expected


def test_a_run_that_is_training_is_read_without_its_lock(tmp_path: Path) -> None:
    config = short(tmp_path, "additive", steps=4, eval_every=2)
    seen: list[Run] = []
    from ddl.lab.train import Trainer

    original = Trainer.step

    def step(self: Trainer, *flags: Any) -> Any:
        if self.steps_done:
            seen.append(read_run(config.directory, "x"))
        return original(self, *flags)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "step", step)
        train(replace(config), quiet())
    assert [run.finished for run in seen] == [False, False, False]
    assert only(config.directory).finished


def test_a_damaged_checkpoint_only_hides_the_checksum(tmp_path: Path) -> None:
    run = train(short(tmp_path, "additive", steps=1), quiet()).run
    path = run.find_checkpoint("last")
    assert path is not None
    (path / "manifest.json").write_text("{")
    assert only(run.path).data is None
    shutil.rmtree(path)
    assert only(run.path).data is None


def test_the_plot(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, losses=[3.0, 2.0]) for name in ("a$b", "_c", "d[/x]")]
    write_evaluation(tmp_path / "hf", {0: {"piqa": 60.0}})
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "ddl"}')
    plot(compare([*runs, tmp_path / "hf"]), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"^`plot` must be writable, got "):
        plot(compare(runs), tmp_path / "nothing" / "plot.png")


@pytest.mark.parametrize("value", [None, "0.5", True, math.nan, math.inf, -0.1, 1.5, 10**30, []])
def test_no_other_metric_is_shown_for_one_that_is_no_number(value: object) -> None:
    assert metric_of({"acc,none": 0.5, "acc_norm,none": 0.6}) == ("acc_norm", 60.0)
    assert metric_of({"acc,none": 0.5, "acc_norm,none": value}) is None
    assert metric_of({"acc,none": 0.5}) == ("acc", 50.0)
    assert metric_of({"acc,none": value, "f1,none": 0.5}) is None
    if not isinstance(value, float) or not math.isfinite(value):
        assert metric_of({"word_perplexity,none": value, "f1,none": 0.5}) is None
    assert metric_of({"alias": "x", "word_perplexity,none": 31.5}) == ("word_perplexity", 31.5)
