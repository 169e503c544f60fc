"""The parser and the static checks: scopes of inline asm, source chains, an error for whatever is not understood."""

import numpy as np
import pytest
from lanes import run_lanes

from flashladder.common.emulator.compile.codegen import compile_kernel
from flashladder.common.emulator.errors import PtxSyntaxError, UninitialisedRegisterError, UnsupportedInstructionError
from flashladder.common.emulator.execute.vocabulary import VOCABULARY
from flashladder.common.emulator.parse.parser import parse

LANES = 32
A = np.arange(LANES, dtype=np.uint32)


def kernel(body, declarations=""):
    return f".version 8.7\n.target sm_80\n.address_size 64\n{declarations}.visible .entry k()\n{{\n{body}\n}}\n"


def test_scopes_of_inline_asm():
    """Equal names in two blocks are different registers and labels; a label may follow its use."""
    code = """
        mov.u32 d, 0;
        {
            .reg .pred p; .reg .b32 t;
            setp.lt.u32 p, a, 16; mov.u32 t, 1; @p bra skip; mov.u32 t, 2;
        skip: add.u32 d, d, t;
        }
        {
            .reg .pred p; .reg .b32 t;
            setp.ge.u32 p, a, 8; mov.u32 t, 10; @p bra skip; mov.u32 t, 20; skip: add.u32 d, d, t;
        }
    """
    outputs, _ = run_lanes(code, {"a": A}, {"d": "u4"})
    assert (outputs["d"] == np.where(A < 16, 1, 2) + np.where(A >= 8, 10, 20)).all()


def test_source_chains():
    text = kernel(
        """
        .reg .b32 %r<3>;
        .loc 1 40 5
        mov.u32 %r0, 1;
        .loc 2 26 9, function_name $L__info_string0, inlined_at 1 40 5
        mov.u32 %r1, 2;
        .loc 3 10 71, function_name $L__info_string1 + 16, inlined_at 2 26 9
        mov.u32 %r2, 3;
        .loc 1 0 5
        ret;
        """
    )
    text += '.file 1 "/src/kernel.cu"\n.file 2 "/src/load.cuh"\n.file 3 "ptx.cuh"\n'
    chains = [instruction.where() for instruction in parse(text).instructions]
    assert chains == [
        "kernel.cu:40",
        "load.cuh:26 < kernel.cu:40",
        "ptx.cuh:10 < load.cuh:26 < kernel.cu:40",
        "ptx.cuh:10 < load.cuh:26 < kernel.cu:40",  # line 0 says nothing new
    ]


def test_comments_sections_and_directives():
    text = kernel(
        """
        // a comment; with a semicolon { and a brace
        .reg .b32 %r<2>; .reg .pred %p<1>;
        .pragma "nounroll";
        mov.u32 %r0, 1; /* two
        lines */ mov.u32 %r1, 2;
    $L__BB0_1: setp.eq.u32 %p0, %r0, %r1; @%p0 bra $L__BB0_1; ret;
        """,
        ".const .align 4 .b8 info[8] = {1, 0, 0, 0, 0xFF, 0, 0, 0};\n",
    )
    text = text.replace(
        "k()", "k(.param .align 8 .b8 k_param_0[16],\n\t.param .u32 k_param_1)\n.maxntid 128, 1, 1\n.minnctapersm 2"
    )
    text += "\t.section\t.debug_str\n\t{\n$L__info_string0:\n.b8 95,90,0\n\n\t}\n"
    found = parse(text)
    assert [i.opcode for i in found.instructions] == ["mov.u32", "mov.u32", "setp.eq.u32", "bra", "ret"]
    assert [(p.name, p.size) for p in found.params.values()] == [("k_param_0", 16), ("k_param_1", 4)]
    assert found.variables["info"].data == bytes([1, 0, 0, 0, 255, 0, 0, 0])
    assert found.labels == {"$L__BB0_1": 2}
    assert found.instructions[2].line == text.split("\n").index(next(x for x in text.split("\n") if "BB0_1:" in x)) + 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (".reg .b32 a; frob.b32 a, 1; ret;", r"does not know `frob\.b32`, at PTX line 6: `frob\.b32 a, 1`"),
        (".reg .f32 a; mov.f32 a, 0f00000000; add.f32.sat a, a, a; ret;", r"does not know `add\.f32\.sat`"),
        (".reg .f32 a; mov.f32 a, 0f00000000; ex2.full.f32 a, a; ret;", r"does not know `ex2\.full\.f32`"),
        (".reg .b64 a; mov.u64 a, 0; ld.global.L3::128B.b64 a, [a]; ret;", r"does not know `ld\.global\.L3::128B\."),
    ],
)  # fmt: skip
def test_unknown_instruction_or_modifier(body, message):
    with pytest.raises(UnsupportedInstructionError, match=message):
        compile_kernel(parse(kernel(body)), VOCABULARY)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.u32 a, 1; ret;", r"PTX line 6: unknown operand a in: mov\.u32 a, 1"),
        (".reg .b32 a; mov.u32 a, 1x; ret;", "PTX line 6: unknown value: 1x"),
        (".reg .b32 a; bra nowhere; ret;", "PTX line 6: unknown label nowhere"),
        (".reg .b32 a; @p bra somewhere; ret;", "PTX line 6: unknown guard: @p bra somewhere"),
        (".reg .b77 a; ret;", r"PTX line 6: unknown register declaration: \.reg \.b77 a"),
        (".reg .b32 a; mov.u32 a, 1;", "control runs past the end of k"),
        (".reg .b32 a; mov.u32 a, 1", "unfinished statement"),
    ],
)
def test_text_that_is_no_ptx(body, message):
    with pytest.raises(PtxSyntaxError, match=message):
        compile_kernel(parse(kernel(body)), VOCABULARY)


def test_entries_by_name():
    text = kernel("ret;") + kernel("trap; ret;").replace("k()", "other()").split("\n", 3)[3]
    assert len(parse(text, "other").instructions) == 2
    with pytest.raises(PtxSyntaxError, match="no entry 'third' in the PTX; it has: k, other"):
        parse(text, "third")
    with pytest.raises(PtxSyntaxError, match="no entry None in the PTX; it has: k, other"):
        parse(text)


@pytest.mark.parametrize(
    ("code", "lane"),
    [
        ("add.u32 d, b, 1;", 0),
        ("setp.gt.u32 p, a, 3; @p add.u32 d, b, 1;", 4),
        ("setp.gt.u32 p, a, 3; @p bra x; mov.u32 b, 1; x: add.u32 d, b, 1;", 4),
    ],
)
def test_register_that_a_lane_has_never_written(code, lane):
    with pytest.raises(UninitialisedRegisterError, match=rf"register b is read before .*\n.*warp 0, lane {lane}, at"):
        run_lanes(code, {"a": A}, {"d": "u4"}, registers=".reg .b32 b; .reg .pred p;")


def test_register_that_is_unwritten_only_where_no_lane_comes():
    """As in the epilogue of CUTLASS's GEMMs for Hopper, which asks twice whether a stride is zero."""
    code = """setp.eq.u32 p, a, 3; @p bra x; mov.u32 b, 1; x: setp.ne.u32 p, a, 3; @p bra y; mov.u32 b, 2;
        y: add.u32 d, b, 1;"""
    outputs, _ = run_lanes(code, {"a": A}, {"d": "u4"}, registers=".reg .b32 b; .reg .pred p;")
    assert (outputs["d"] == np.where(A == 3, 3, 2)).all()


def test_register_written_under_a_guard_and_its_opposite():
    """As inline asm does that loads under a predicate."""
    code = "setp.lt.u32 p, a, 9; @!p mov.u32 d, 0; @p add.u32 d, a, 1;"
    outputs, _ = run_lanes(code, {"a": A}, {"d": "u4"}, registers=".reg .pred p;")
    assert (outputs["d"] == np.where(A < 9, A + 1, 0)).all()


def test_immediates():
    code = """
        mov.u32 d, 0x1F; add.u32 d, d, 0b101; add.u32 d, d, 010; add.u32 d, d, -1; add.u32 d, d, 7U;
        mov.f32 e, 0f40490FDB; mov.f64 f, 0d400921FB54442D18; add.f32 g, e, 0fBF800000;
    """
    outputs, _ = run_lanes(code, {}, {"d": "u4", "e": "f4", "f": "f8", "g": "f4"})
    assert (outputs["d"] == 31 + 5 + 8 - 1 + 7).all()
    assert (outputs["e"] == np.float32(np.pi)).all()
    assert (outputs["f"] == np.pi).all()
    assert (outputs["g"] == np.float32(np.pi) - np.float32(1)).all()
