"""Random PTX for the emulator and the reference: every instruction that both know, and programs of them."""

import itertools
import re

import numpy as np

# Registers by pool: what they hold, how many there are, and the numpy type of their values. Pools never mix floats with
# integers, as the bits of a NaN are open: a NaN of a float pool equals any other.
POOLS = {
    "a": ("b32", 4, "u4"), "l": ("b64", 3, "u8"), "h": ("b16", 3, "u2"), "p": ("pred", 3, "?"), "f": ("f32", 4, "f4"),
    "d": ("f64", 3, "f8"), "x": ("b32", 3, "u4"), "y": ("b32", 3, "u4"),
}  # fmt: skip
NAMES = [f"{pool}{n}" for pool, (_, count, _) in POOLS.items() for n in range(count)]
PARTS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "f64": (11, 52)}  # bits of exponent and mantissa
FLOATS_OF_POOL = {"f": "f32", "d": "f64", "x": "f16", "y": "bf16"}

# opcode, target, sources; {a,b} is one of each. A source is a pool, or n for a small number, or o for an odd divisor.
FORMS = """
{add,sub,mul.lo,mul.hi}.{u32,s32} a a a    mad.{lo,hi}.{u32,s32} a a a a    mul.wide.{u32,s32} l a a
{add,sub,mul.lo,mul.hi}.{u64,s64} l l l    mad.{lo,hi}.{u64,s64} l l l l    mad.wide.{u32,s32} l a a l
{add,sub,mul.lo,mul.hi}.{u16,s16} h h h    mad.lo.{u16,s16} h h h h    {mul.wide}.{u16,s16} a h h
{div,rem}.{u32,s32} a a o    {div,rem}.{u64,s64} l l o    {div,rem}.{u16,s16} h h o    {min,max}.{u32,s32} a a a
{min,max}.{u64,s64} l l l    {min,max}.{u16,s16} h h h    {abs,neg}.s32 a a    {abs,neg}.s64 l l    {abs,neg}.s16 h h
{and,or,xor}.b32 a a a    {and,or,xor}.b64 l l l    {and,or,xor}.b16 h h h    {and,or,xor}.pred p p p
{not,cnot}.b32 a a    {not,cnot}.b64 l l    {not,cnot}.b16 h h    not.pred p p    mov.pred p p    mov.pred p n
{and,or,xor}.pred p p n    {shl.b32,shr.u32,shr.s32} a a n    {shl.b64,shr.u64,shr.s64} l l n
{shl.b16,shr.u16,shr.s16} h h n    {shl.b32,shr.u32,shr.s32} a a a    {shl.b64,shr.u64,shr.s64} l l a
{shl.b16,shr.b16,shr.u16,shr.s16} h h a    shf.{l,r}.{wrap,clamp}.b32 a a a a    shf.{l,r}.{wrap,clamp}.b32 a a a n
lop3.b32 a a a a n    prmt.b32 a a a a    bfe.{u32,s32} a a n n    bfe.{u64,s64} l l n n    bfi.b32 a a a n n
bfi.b64 l l l n n    bfe.{u32,s32} a a a a    bfe.{u64,s64} l l a a    bfi.b32 a a a a a    bfi.b64 l l l a a
brev.b32 a a    brev.b64 l l    {popc,clz}.b32 a a    {popc,clz}.b64 a l    bfind.u32 a a    bfind.u64 a l
mov.{b32,u32} a a    mov.b64 l l    mov.b16 h h    mov.f32 f f    mov.f64 d d    mov.b32 x x    mov.b32 y y
selp.{b32,s32} a a a p    selp.b64 l l l p    selp.b16 h h h p    selp.f32 f f f p    selp.f64 d d d p
slct.{u32,s32}.s32 a a a a    slct.b64.s32 l l l a    slct.f32.f32 f f f f    slct.b32.f32 a a a f
setp.{eq,ne,lt,le,gt,ge,lo,ls,hi,hs}.u32 p a a    setp.{eq,ne,lt,le,gt,ge}.s32 p a a    setp.{eq,ne}.b32 p a a
setp.{eq,ne,lt,le,gt,ge}.{u64,s64} p l l
setp.{eq,ne,lt,le,gt,ge}.{u16,s16} p h h    setp.{lo,hs}.u64 p l l
setp.{lt,ge}.{and,or,xor}.s32 p a a p
setp.{lt,eq}.{u32,s32} q a a    setp.{gt}.{and,or,xor}.u32 q a a p    set.{eq,lt}.{u32,s32}.{u32,s32} a a a
setp.{eq,ne,lt,le,gt,ge,equ,neu,ltu,leu,gtu,geu,num,nan}.f32 p f f    setp.{lt,gt,ge,equ,neu}.ftz.f32 p f f
setp.{eq,ne,lt,ge,equ,ltu,num,nan}.f64 p d d    setp.{eq,lt,geu,nan}.{f16,bf16} p h h
setp.{lt}.{and,xor}.f32 q f f p    set.{lt,ge}.{u32,s32}.f32 a f f    set.{lt,ge}.ftz.f32.f32 f f f
set.eq.f32.u32 f a a    {add,sub,mul}{.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32 f f f
{add,sub,mul}{,.ftz}{,.sat}.f32 f f f    {fma}{.rn,.rz,.rm,.rp}{,.ftz}{,.sat}.f32 f f f f    mad.rn.f32 f f f f
{add,sub,mul}{,.rn}.f64 d d d    {fma,mad}.rn.f64 d d d d    div.rn{,.ftz}.f32 f f f    div.rn.f64 d d d
{rcp,sqrt}.rn{,.ftz}.f32 f f    {rcp,sqrt}.rn.f64 d d    {min,max}{,.ftz}{,.NaN}.f32 f f f    {min,max}.f64 d d d
{abs,neg}{,.ftz}.f32 f f    {abs,neg}.f64 d d    {add,sub,mul}{,.rn}.f16x2 x x x    {add,sub,mul}{,.rn}.bf16x2 y y y
{add,mul}{,.rn}.sat.f16x2 x x x    fma.rn{,.relu}.f16x2 x x x x    fma.rn{,.relu}.bf16x2 y y y y
{min,max}{,.NaN}.f16x2 x x x    {min,max}{,.NaN}.bf16x2 y y y    {abs,neg}.f16x2 x x    {abs,neg}.bf16x2 y y
cvt.{u8,s8,u16,s16}.{u32,s32} a a    cvt.{u32,s32}.{u8,s8} a a    cvt.{u64,s64}.{u32,s32} l a
cvt.{u8,s8,u32,s32}.{u64,s64} a l
cvt.{u16,s16}.{u32,s32,u8,s8} h a    cvt.{u32,s32}.{u16,s16} a h    cvt.sat.{u8,s8,s16,u16}.{u32,s32} a a
cvt.sat.s32.u32 a a    cvt.sat.u32.s32 a a    cvt.sat.{u32,s32}.{u64,s64} a l    cvt.sat.{u64}.{s64} l l
cvt.{rni,rzi,rmi,rpi}{,.ftz}.{s32,u32}.f32 a f    cvt.{rni,rzi,rmi,rpi}.{s64,u64}.f32 l f
cvt.{rni,rzi,rmi,rpi}.{s16,u8}.f32 a f    cvt.{rni,rzi,rmi,rpi}.{s32,u32,s16}.f64 a d
cvt.{rni,rzi,rmi,rpi}.{s64,u64}.f64 l d    cvt.{rni,rzi}.{s32,u32}.f16 a h    cvt.{rzi}.{s64,u64}.f16 l h
cvt.rn.f32.{u32,s32} f a    cvt.rn.f32.{u64,s64} f l    cvt.rn.f64.{u32,s32} d a    cvt.rn.f64.{u64,s64} d l
cvt.rn.f16.{u32,s32} h a    cvt.rn.f16.{u64,s64} h l    cvt.{rni,rzi,rmi,rpi}{,.ftz}.f32.f32 f f
cvt.{rni,rmi}.sat.f32.f32 f f    cvt.{rni,rpi}.f64.f64 d d    cvt.{rni,rzi}.f16.f16 h h    cvt{,.ftz}.f64.f32 d f
cvt.{rn,rz,rm,rp}.f32.f64 f d    cvt.rn.ftz.f32.f64 f d    cvt.rn.sat.f32.f64 f d    cvt.sat.f32.f32 f f
cvt.ftz.f32.f32 f f    cvt.f32.{f16,bf16} f h    cvt.rn{,.sat}.f16.f32 h f    cvt.rn.f16.f64 h d    cvt.f64.f16 d h
cvt.rn{,.relu}.{bf16,f16}.f32 h f    cvt.rn{,.relu}.f16x2.f32 x f f    cvt.rn{,.relu}.bf16x2.f32 y f f
"""
# What may show the sign of a NaN, or is right to some bits only: not for programs that go on with the result.
ALONE = """copysign.f32 f f f    copysign.f64 d d d"""


def expanded(forms):
    """(opcode, target, sources) of each form."""
    for words in re.findall(r"(\S+\.\S+)((?: [a-z])+)", forms):
        parts = re.split(r"\{([^}]*)\}", words[0])
        for choice in itertools.product(*(part.split(",") if n % 2 else [part] for n, part in enumerate(parts))):
            target, *sources = words[1].split()
            yield "".join(choice), target, sources


def small_number(opcode, random):
    """An immediate operand: a predicate, a table, or a number of bits."""
    if opcode.endswith(".pred"):
        return int(random.choice([-1, 0, 2]))
    return int(random.integers(256 if opcode.startswith("lop3") else 70))


INSTRUCTIONS = list(expanded(FORMS))
ALL_INSTRUCTIONS = INSTRUCTIONS + list(expanded(ALONE))


# -- values


def values_of(pool, count, random):
    """Inputs of a register, one a thread: corners, small numbers and any bits."""
    code = POOLS[pool][2]
    if pool == "p":
        return random.integers(0, 2, count).astype(bool)
    if pool in FLOATS_OF_POOL:
        return any_floats(FLOATS_OF_POOL[pool], count * (2 if pool in "xy" else 1), random).view(code)
    width = 8 * np.dtype(code).itemsize
    corners = np.array(
        [0, 1, 2, 31, 32, 33, 63, 64, 255, 2 ** (width - 1), 2 ** (width - 1) - 1, 2**width - 1], np.uint64
    )
    any_bits = random.integers(0, 1 << width, count, np.uint64, endpoint=width < 64)
    return np.where(random.random(count) < 0.4, random.choice(corners, count), any_bits).astype(code)


def any_floats(kind, count, random):
    """Bits of floats: specials, neighbours of 1 and of the ends of the range, whole numbers, and any bits."""
    exponent, mantissa = PARTS[kind]
    width, one, bias = 1 + exponent + mantissa, ((1 << exponent - 1) - 1) << mantissa, (1 << exponent - 1) - 1
    infinity = ((1 << exponent) - 1) << mantissa
    specials = [0, infinity, infinity + 1, (1 << width - 1) - 1, infinity - 1, 1, 3, 1 << mantissa, (1 << mantissa) - 1]
    two = one + (1 << mantissa)
    specials += [one, one + 1, one - 1, two, two + (1 << mantissa - 1), infinity - (1 << mantissa)]
    short = [min(max(bias + int(e), 0), 2 * bias) << mantissa for e in random.integers(-2 * mantissa, 2 * mantissa, 8)]
    short = [bits | int(m) << max(0, mantissa - 6) for bits, m in zip(short, random.integers(0, 64, 8), strict=True)]
    chosen = [
        random.choice(np.array(specials, np.uint64), count),
        random.choice(np.array(short, np.uint64), count),
        random.integers(0, 1 << width - 1, count, np.uint64),
    ]
    sign = random.integers(0, 2, count, np.uint64) << np.uint64(width - 1)
    return (np.choose(random.integers(0, 3, count), chosen) | sign).astype(f"u{width // 8}")


def tie(kind, random):
    """(a, b, c) as bits: a * b is a tie between two floats of their kind, and c so little that only exact arithmetic
    sees it."""
    exponent, mantissa = PARTS[kind]
    bias, sign = (1 << exponent - 1) - 1, int(random.integers(0, 2)) << exponent + mantissa
    low_bits = (mantissa + 1) // 2
    while True:  # factors of few bits, odd, with a product of one bit more than the mantissa holds
        x = 2 * int(random.integers(1 << low_bits - 1, 1 << low_bits)) + 1
        y = 2 * int(random.integers(1 << mantissa - low_bits, 1 << mantissa - low_bits + 1)) + 1
        if (x * y).bit_length() == mantissa + 2:
            break
    factors = [bias << mantissa | (v << mantissa + 1 - v.bit_length()) & (1 << mantissa) - 1 for v in (x, y)]
    return factors[0], factors[1], sign | 1 << mantissa - 3


def inputs_of(count, random):
    """Values of all registers, one a thread. In some lanes the first three of each float pool are a tie for fma; in
    some all are infinities or zeros, of either sign; in some all are one number, of either sign."""
    inputs = {name: values_of(name[0], count, random) for name in NAMES}
    for pool, kind in FLOATS_OF_POOL.items():
        names = [name for name in NAMES if name[0] == pool]
        views = [inputs[name].view(f"u{inputs[name].itemsize}") for name in names]
        packed = 2 if pool in "xy" else 1
        for lane in random.permutation(count)[: count // 4]:
            parts = [related(kind, len(names), random) for _ in range(packed)]
            for n, view in enumerate(views):
                view[lane] = sum(part[n] << (1 + sum(PARTS[kind])) * half for half, part in enumerate(parts))
    return inputs


def related(kind, count, random):
    """Bits of `count` floats, as inputs_of says."""
    if random.random() < 0.5:
        return [*tie(kind, random), 0][:count]
    top, (_, mantissa) = 1 << sum(PARTS[kind]), PARTS[kind]
    infinity = top - (1 << mantissa)
    one_number = [int(any_floats(kind, 1, random)[0]) & ~top] * count
    bits = random.choice([0, infinity], count).tolist() if random.random() < 0.5 else one_number
    return [value | top * sign for value, sign in zip(bits, random.integers(0, 2, count).tolist(), strict=True)]
