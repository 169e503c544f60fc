"""docs/limits.md: what the tables say is what calls launch. That the page is up to date, test_dashboard.py tests."""

import dataclasses

import pytest

from flashladder.common.errors import UnsupportedProblemError
from flashladder.common.paths import ROOT
from flashladder.common.problem.problem import Problem
from flashladder.common.records import factors
from flashladder.common.report import sections
from flashladder.common.report.pages import limits
from flashladder.common.report.pages.limits import Call

CAUSAL = {"causal": True}
PLAIN = Problem(seqlen_q=1024, lse=False)


@pytest.mark.parametrize("operation", limits.OPTIONS)
@pytest.mark.parametrize("gpu", limits.GPUS)
def test_more_columns_than_kernels_have_are_refused(operation, gpu):
    call, head_dim = Call(operation, {}), 520 if operation == limits.FIRST else 512
    with pytest.raises(UnsupportedProblemError, match=f"not {head_dim}"):
        limits.rung_of(call.problem(*call.columns(head_dim, head_dim, gpu)), gpu)


def timed(run, causal_us=None):
    """A run's times at two lengths, with a causal mask or without."""
    longer = dataclasses.replace(PLAIN, seqlen_q=2048, seqlen_k=2048)
    found = {(run, "hot", problem): 100.0 for problem in (PLAIN, longer)}
    if causal_us:
        pairs = zip((PLAIN, longer), causal_us, strict=True)
        found |= {(run, "hot", dataclasses.replace(problem, **CAUSAL)): time for problem, time in pairs}
    return found


def test_a_factor_is_of_the_latest_run_that_has_both():
    times = {"48": timed("1", (90, 90)) | timed("2", (40, 90)) | timed("3")}
    assert factors.factor(PLAIN, CAUSAL, ("48", "48"), times) == pytest.approx(0.6)
    assert factors.factor(PLAIN, {"softcap": 30.0}, ("48", "48"), times) is None
    assert factors.factor(PLAIN, CAUSAL, ("48", "24"), times) is None
    apart = {"48": timed("1"), "24": timed("2", (40, 90))}
    assert factors.factor(PLAIN, CAUSAL, ("48", "24"), apart) is None, "of two runs"
    assert factors.factor(dataclasses.replace(PLAIN, dtype="fp16"), CAUSAL, ("48", "48"), times) is None


def test_the_page_tells_of_every_option():
    table = sections.between(limits.PAGE, limits.MARKER)
    names = [name for options in limits.OPTIONS.values() for name in options]
    assert all(table.count(f"\n| {name} |") == len(limits.GPUS) for name in names)
    assert (ROOT / "docs" / "limits.md") == limits.PAGE


def test_the_projects_own_logs_have_factors():
    """Wherever logs are kept: without them the column would be empty."""
    times = factors.measured(ROOT / "results")
    plain, card = Problem(batch=4, num_heads=16, seqlen_q=4096, lse=False), limits.GPUS[0]
    rung = limits.rung_of(plain, card).name
    assert 0.4 < factors.factor(plain, CAUSAL, (rung, rung), times) < 1
