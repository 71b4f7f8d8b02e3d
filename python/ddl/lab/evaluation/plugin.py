"""The model `ddl` of lm-evaluation-harness's own command.

Releases of lm-eval that read entry points find it by its name: `lm_eval --model ddl --model_args
pretrained=runs/tiny`. Before them, `import ddl.lab.evaluation.plugin` registers it.
"""

from __future__ import annotations

from pathlib import Path

from lm_eval.api.registry import register_model  # type: ignore[import-untyped]

from ddl.errors import InputError
from ddl.lab.load import load_for_transformers
from ddl.lab.output import one_line

from .harness import Harness

__all__ = ["DDL"]


@register_model("ddl")
class DDL(Harness):
    """A run, or a model that transformers loads, as lm-eval's `--model ddl`.

    Args:
        pretrained: the run directory, or the directory of a Hugging Face model.
        checkpoint: of a run: "last", "best" or a step.
        batch_size: sequences at once, or "auto".
        max_batch_size: of "auto"; None for as many as `ddl eval` tries.
        device: "cpu", "cuda", …; None for the GPU if there is one.

    Raises InputError if `pretrained` cannot be loaded. A run is scored in float32, any other model
    in the dtype it was saved in, as `ddl eval` does.
    """

    def __init__(
        self,
        pretrained: str | Path,
        *,
        checkpoint: str | int = "last",
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        try:
            model, tokenizer = load_for_transformers(
                pretrained, device or "auto", checkpoint=str(checkpoint), argument="pretrained"
            )
        except (
            InputError
        ) as error:  # lm-eval prints it, where `ddl` does not escape what is printed
            raise InputError.sentence(one_line(str(error))) from None
        super().__init__(model, tokenizer, batch_size)
        if max_batch_size is not None:
            self.max_batch_size = max_batch_size
