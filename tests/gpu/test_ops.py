"""Tests of tests/ops on the GPU: every operator against the reference in float64, also with several
documents in a sequence, and under opcheck, gradcheck, torch.compile, autocast, checkpointing and
export.
"""

from __future__ import annotations

from tests.ops import test_documents, test_ops, test_ops_torch

OF_THE_CPU = {"test_results_do_not_depend_on_the_number_of_threads"}

for _module in (test_ops, test_ops_torch):
    for _name, _test in vars(_module).items():
        if _name.startswith("test_") and _name not in OF_THE_CPU:
            globals()[_name] = _test

test_reads_of_documents = test_documents.test_reads
test_expansions_of_documents = test_documents.test_expansions
test_parts_of_documents = test_documents.test_parts_of_the_tokens_begin_anywhere_in_a_document
