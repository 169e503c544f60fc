"""What a kernel declares, read from its PTX, and what ptxas says of it, read from its log."""

import pytest

from flashladder.common.compiler import LaunchInfo, declaration
from flashladder.common.compiler.artifact import resources as read_resources
from flashladder.common.compiler.declaration import ParamsField
from flashladder.common.errors import BuildError

LAUNCH = ".const .align 4 .b8 launch_main[268] = {128, 0, 0, 0, 0, 192, 0, 0, 64, 0, 0, 0, 32, 0, 0, 0, 160};"
FIELDS = (
    f".const .align 4 .b8 params_main[68] = {{113, {'0, ' * 26}81, 0, 0, 0, 0, 120, {'0, ' * 26}105, 8, 0, 0, 0, 12}};"
)


def test_what_a_kernel_declares_is_read_from_its_ptx():
    declared = declaration.read(f"// header\n{LAUNCH}\n{FIELDS}\n")
    fields = ParamsField("q", "Q", 0), ParamsField("x", "i", 8)
    assert declared.launches == {"main": LaunchInfo(128, 49152, 64, 32, 160, fields=fields)}


@pytest.mark.parametrize(
    ("ptx", "message"),
    [
        (LAUNCH, "main declares no fields of its argument; put FLASHLADDER_FIELDS"),
        (LAUNCH.replace("268", "20"), "the kernel's declaration has 20 bytes, LaunchRecord 268"),
    ],
)
def test_a_declaration_of_another_kind_is_refused(ptx, message):
    with pytest.raises(BuildError, match=message):
        declaration.read(ptx)


def test_resources_are_read_from_the_log_of_ptxas():
    log = """ptxas info    : Compiling entry function 'attention_forward' for 'sm_80'
ptxas info    : Function properties for attention_forward
    40 bytes stack frame, 44 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 592 bytes cmem[0]"""
    resources = {"registers": 255, "stack_bytes": 40, "spill_store_bytes": 44, "spill_load_bytes": 24}
    assert read_resources(log, "attention_forward") == resources
