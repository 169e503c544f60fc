"""The same as test_mutations.py for lists that are made of a mask, and for who waits for them."""

import pytest
from one_kernel import OneKernel

from flashladder.common.problem.problem import Problem

pytestmark = pytest.mark.slow


FEW = {"num_heads": 1, "head_dim": 64}


def kernel(entry, mask, **sizes):
    usual = {"seqlen_q": 100, "seqlen_k": 700, "causal": False}
    return OneKernel("52", entry, Problem(**usual | FEW | sizes, mods=f"mask={mask}"))


def of_gradients(entry):
    """More tiles of keys than a CTA of the kernel that counts has."""
    sizes = {"seqlen_q": 140, "seqlen_k": 1200, "mods": "mask=k<=q&&k/128%3!=1"}
    return OneKernel("backward/24", entry, Problem(**FEW | sizes, operation="backward"))


def lists():
    """More blocks than a CTA lists at once: of some whole ones, of others parts are seen."""
    return kernel("list_blocks", "k/64%16==3&&k!=q+9000||k==16500", seqlen_k=16600)


def asked(kernel, *opcodes):
    """How many changes there are of a kernel's instructions of these kinds, and those that nobody tells."""
    changes = {name: each for name, each in kernel.mutations() if name[0].startswith(opcodes)}
    _, outputs = kernel.run(kernel.program)
    return len(changes), kernel.missed(changes, (), outputs)


def test_the_loss_of_any_synchronisation_of_the_kernel_that_lists_is_reported():
    lists().is_exact("52, list_blocks")


@pytest.mark.parametrize(("dropout_p", "waiting"), [(0.0, 2), (0.1, 3)])
def test_whoever_reads_a_list_waits_for_it(dropout_p, waiting):
    """The producer, the consumers, and with dropout what draws the weights that are kept."""
    assert asked(kernel("attention_forward", "k<=q", dropout_p=dropout_p), "griddepcontrol") == (waiting, [])


def test_the_kernel_that_counts_tiles_has_no_synchronisation_of_its_own():
    """What tells which of its CTAs comes last is at work, too."""
    counting = of_gradients("classify_tiles")
    assert counting.counted() <= lists().counted()
    assert asked(counting, "fence", "membar") == (4, [])  # two fences, each gone, and of a CTA alone


def test_rows_are_listed_behind_the_count_and_the_first_pass_ends_behind_the_lists():
    """Of the emulator a kernel ends when all before it have. On a GPU the loop waits for the first pass alone."""
    assert asked(of_gradients("list_rows"), "griddepcontrol") == (1, [])
    first_pass = of_gradients("backward_prepare")
    report, _ = first_pass.run(first_pass.program)
    assert report.instructions["griddepcontrol.wait"] == 8  # the warps of one CTA
