"""What a log's cell of a configuration may hold: other characters in an expression alone."""

import pytest
from pydantic import TypeAdapter, ValidationError

from flashladder.common.records.cells import ConfigText

CELLS: TypeAdapter[str] = TypeAdapter(ConfigText)
DOCUMENTS = "int(8*sqrt((k+0.5)/seqlen_k))==int(8*sqrt((q+0.5)/seqlen_k))"


@pytest.mark.parametrize(
    "config",
    ["block_m=64,num_warps=4", f"causal=false,mods=mask=k<=q&&{DOCUMENTS},block_m=64", "mods=mask=max(q,3)<=k"],
)
def test_a_configuration_stands(config):
    assert CELLS.validate_python(config) == config


@pytest.mark.parametrize(
    "config",
    [
        "mods=<script>alert(1)</script>",
        "mods=mask=k<=q,block_m=<b>",
        "mods=mask=k <= q",  # no configuration spells it so
        "mods=mask=k<=q,www.a.b=1",
        "a|b",
        "=SUM(A1)",
    ],
)
def test_what_is_none_is_refused(config):
    with pytest.raises(ValidationError):
        CELLS.validate_python(config)
