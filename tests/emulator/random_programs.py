"""Programs of random instructions, with branches, loops, memory and what threads do together.

The blocks of a program stand in random order: where its ways join must not depend on the layout. A statement that needs
other threads stands only where it is known which come there.
"""

import itertools
from dataclasses import dataclass, field

from random_ptx import FLOATS_OF_POOL, INSTRUCTIONS, NAMES, POOLS, small_number

FULL = 0xFFFFFFFF
DECLARATIONS = ".shared .align 16 .b8 buffer[8192]; .global .align 16 .b8 scratch[16384]; "
SLOT, COUNTERS = 32, 4096  # bytes of shared and global memory that belong to a thread; where shared counters begin
SORTED = sorted(INSTRUCTIONS)
FAMILIES = [list(group) for _, group in itertools.groupby(SORTED, key=lambda each: each[0].split(".")[0])]
MEMORY_ACCESSES = [  # type, pool, bytes
    ("b8", "a", 1), ("s8", "a", 1), ("u16", "h", 2), ("s16", "a", 2), ("b32", "a", 4), ("f32", "f", 4), ("b64", "l", 8),
    ("f64", "d", 8), ("b32", "x", 4), ("v2.b32", "a", 8), ("v2.f32", "f", 8), ("v2.u64", "l", 16), ("v4.b32", "a", 16),
]  # fmt: skip
ATOMICS = [
    *["add.f32"] * 3, "add.u32", "min.s32", "max.u32", "and.b32", "or.b32", "xor.b32", "exch.b32", "cas.b32", "inc.u32",
    "dec.u32", "add.u64", "max.s64", "exch.b64",
]  # fmt: skip
VOTES = ["all.pred", "any.pred", "uni.pred", "ballot.b32", "add.u32", "min.s32", "max.u32", "xor.b32", "and.b32"]
SUMS = ["c0", "c1", "c2", "c3"]  # accumulators of mma
REGISTERS = """
    .reg .b32 own, other, tid, lane, e0, e1, e2, g0, g1, g2, g3, g4, g5; .reg .b64 place; .reg .pred t;
    .reg .b16 odd16; .reg .b32 odd32; .reg .b64 odd64;
"""


@dataclass(frozen=True)
class Context:
    """Who comes here: lanes by a mask (None: it depends on data), in every warp alike or not; how deep we are."""

    members: int | None = FULL
    whole_cta: bool = True
    depth: int = 0


@dataclass
class Writer:
    """Collects the blocks of one program."""

    random: object
    num_threads: int
    may_leave: bool
    chunks: list[list[str]] = field(default_factory=lambda: [[]])
    numbers: itertools.count = field(default_factory=itertools.count)

    def line(self, text):
        self.chunks[-1].append(text)

    def block(self, label):
        self.chunks.append([f"{label}:"])

    def pick(self, items):
        return items[int(self.random.integers(len(items)))]

    def register(self, pool):
        return f"{pool}{self.random.integers(POOLS[pool][1])}"

    def chance(self, probability):
        return self.random.random() < probability

    # -- statements

    def statements(self, count, context):
        for _ in range(count):
            kinds = [self.compute] * 5 + [self.memory, self.atomic]
            if context.depth < 3:
                kinds += [self.branch_on_data, self.loop_on_data, self.branch_on_lane, self.uniform_loop]
            if self.may_leave:
                kinds += [self.leave] * (context.depth > 0)
            elif context.members is not None:
                kinds += [self.shuffle, self.shuffle, self.vote, self.sync_warp]
                if context.members == FULL and self.num_threads % 32 == 0:
                    kinds += [self.multiply]
                if context.whole_cta:
                    kinds += [self.exchange, self.count, self.barrier_reduction]
            self.pick(kinds)(context)

    def compute(self, context):
        opcode, target, sources = self.pick(self.pick(FAMILIES))
        operands = [self.operand(source, opcode) for source in sources]
        target = f"{self.pick(['p0|p1', '_|p2', 'p1|_'])}" if target == "q" else self.register(target)
        guard = self.pick(["", "", "", "@p0 ", "@!p1 "])
        self.line(f"{guard}{opcode} {target}, {', '.join(operands)};")

    def operand(self, source, opcode):
        if source == "n":
            return str(small_number(opcode, self.random))
        if source == "o":  # a division by zero is not defined
            width = opcode[-2:]
            self.line(
                f"or.b{width} odd{width}, {self.register(dict(zip(('16', '32', '64'), 'hal', strict=True))[width])}, 1;"
            )
            return f"odd{width}"
        if source in "ah" and self.chance(0.15) and opcode.split(".")[0] in ("add", "and", "xor", "mul", "setp", "min"):
            return str(self.pick([0, 1, 7, 100, 32767]))
        return self.register(source)

    def branch(self, condition, then, otherwise, context):
        """Two ways from a predicate that `condition` leaves in t, for the lanes `then` and those of `otherwise`."""
        n = next(self.numbers)
        self.line(f"{condition} " + self.pick([f"@t bra then{n}; bra else{n};", f"@!t bra else{n}; bra then{n};"]))
        for label, members in ((f"then{n}", then), (f"else{n}", otherwise)):
            self.block(label)
            if members != 0 and self.chance(0.8):
                self.statements(int(self.random.integers(1, 4)), Context(members, False, context.depth + 1))
            self.line(f"bra join{n};")
        self.block(f"join{n}")

    def branch_on_data(self, context):
        compared = f"setp.lt.s32 t, {self.register('a')}, {self.register('a')};"
        self.branch(self.pick([compared, f"mov.pred t, {self.register('p')};"]), None, None, context)

    def branch_on_lane(self, context):
        bound = int(self.random.integers(1, 32))
        low = (1 << bound) - 1
        members = (None, None) if context.members is None else (context.members & low, context.members & ~low & FULL)
        self.branch(f"setp.lt.u32 t, lane, {bound};", *members, context)

    def loop(self, start, context):
        """A loop of as many rounds as its counter says."""
        n = next(self.numbers)
        self.chunks[0].insert(0, f".reg .b32 n{n};")
        self.line(f"{start.format(f'n{n}')} bra head{n};")
        self.block(f"head{n}")
        self.line(f"setp.eq.u32 t, n{n}, 0; @t bra done{n}; bra body{n};")
        self.block(f"body{n}")
        self.line(f"sub.u32 n{n}, n{n}, 1;")
        self.statements(int(self.random.integers(1, 4)), context)
        if context.members is None and self.chance(0.4):  # `continue`
            self.line(f"@p2 bra head{n};")
            self.statements(1, context)
        self.line(f"bra head{n};")
        self.block(f"done{n}")

    def loop_on_data(self, context):
        inner = Context(None, False, context.depth + 1)
        self.loop(f"and.b32 {{}}, {self.register('a')}, 3;", inner)

    def uniform_loop(self, context):
        self.loop(
            f"mov.u32 {{}}, {self.random.integers(1, 3)};",
            Context(context.members, context.whole_cta, context.depth + 1),
        )

    def leave(self, context):
        self.line(f"@{self.register('p')} bra end;")

    # -- memory: each thread has bytes of its own

    def memory(self, context):
        opcode, pool, size = self.pick(MEMORY_ACCESSES)
        space, base = self.pick([(".shared", "own"), (".global", "place"), ("", "place")])
        place = f"[{base}+{size * int(self.random.integers(1 if pool in FLOATS_OF_POOL else SLOT // size))}]"
        count = int(opcode[1]) if opcode[0] == "v" else 1
        sources = [self.register(pool) for _ in range(count)]
        targets = [f"{pool}{n}" for n in self.random.permutation(POOLS[pool][1])[:count]]
        sources, targets = (f"{{{', '.join(names)}}}" if count > 1 else names[0] for names in (sources, targets))
        guard = self.pick(["", "", "@p1 "])
        store = f"{guard}st{space}.{opcode} {place}, {sources};"
        if pool in FLOATS_OF_POOL:  # the bytes may be a NaN's: they are gone before others read them
            self.line(f"{store} {guard}ld{space}.{opcode} {targets}, {place}; st{space}.b64 {place}, l0;")
        else:
            self.line(f"{store} ld{space}.{opcode} {targets}, {place};")

    def atomic(self, context):
        name = self.pick(ATOMICS)
        space, base = self.pick([(".shared", "own"), (".global", "place")])
        if name == "add.f32":
            a, b, c, d = (self.register("f") for _ in range(4))
            self.line(f"st{space}.f32 [{base}+8], {a}; atom{space}.add.f32 {b}, [{base}+8], {c};")
            self.line(f"ld{space}.f32 {d}, [{base}+8]; st{space}.b32 [{base}+8], a0;")
            return
        pool = "l" if "64" in name else "a"
        values = ", ".join(self.register(pool) for _ in range(2 if name.startswith("cas") else 1))
        self.line(f"atom{space}.{name} {self.register(pool)}, [{base}+8], {values};")

    # -- together

    def shuffle(self, context):
        pool = self.pick("aaf")
        value, target, members = self.register(pool), self.register(pool), context.members
        if members == FULL and self.num_threads % 32 == 0:
            mode, segment = self.pick(["up", "down", "bfly", "idx"]), self.pick([0, 16, 24, 28, 30])
            clamp = segment << 8 | (0 if mode == "up" else self.pick([31, 31, 15]))
            lane = self.pick([self.register("a"), str(self.random.integers(32))])
            self.line(f"shfl.sync.{mode}.b32 {target}|t, {value}, {lane}, {clamp}, -1; mov.pred p2, t;")
        else:
            lanes = [n for n in range(min(32, self.num_threads % 32 or 32)) if members >> n & 1]
            if lanes:
                self.line(f"shfl.sync.idx.b32 {target}, {value}, {self.pick(lanes)}, 31, {members};")

    def vote(self, context):
        kind, predicate = self.pick(VOTES), self.pick(["p0", "!p1", "p2"])
        if kind[:3] in ("all", "any", "uni", "bal"):
            target = self.register("p" if "pred" in kind else "a")
            self.line(f"vote.sync.{kind} {target}, {predicate}, {context.members};")
        else:
            self.line(f"redux.sync.{kind} {self.register('a')}, {self.register('a')}, {context.members};")

    def sync_warp(self, context):
        self.line(f"bar.warp.sync {context.members};")

    def multiply(self, context):
        kind, depth = self.pick(["f16", "bf16"]), self.pick([8, 16])
        a = ", ".join(f"g{n}" for n in range(depth // 4))
        b = ", ".join(f"g{4 + n}" for n in range(depth // 8))
        shape, c = f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32", ", ".join(SUMS)
        self.line(f"mma.sync.aligned.{shape} {{{c}}}, {{{a}}}, {{{b}}}, {{{c}}};")
        self.line("cvt.rzi.s32.f32 e0, c0; and.b32 e0, e0, 255; cvt.rn.f32.s32 c0, e0;")

    def exchange(self, context):
        """Every thread reads what another has written."""
        source, target = self.register("a"), self.register("a")
        self.line(f"st.shared.b32 [own], {source}; bar.sync 0; ld.shared.b32 {target}, [other]; bar.sync 0;")

    def count(self, context):
        """All threads update one word."""
        counter = f"[buffer+{COUNTERS + 4 * int(self.random.integers(4))}]"
        kind = self.pick(["add.u32", "min.u32", "max.s32", "xor.b32"])
        self.line(f"bar.sync 0; red.shared.{kind} {counter}, {self.register('a')}; bar.sync 0;")
        self.line(f"ld.shared.b32 {self.register('a')}, {counter}; bar.sync 0;")

    def barrier_reduction(self, context):
        kind = self.pick(["and.pred", "or.pred", "popc.u32"])
        self.line(f"bar.red.{kind} {self.register('a' if 'popc' in kind else 'p')}, 0, {self.pick(['p0', '!p1'])};")


def random_program(random, num_threads):
    """The text of a program on the registers NAMES and SUMS, with inputs i_NAME, and those of REGISTERS."""
    writer = Writer(random, num_threads, may_leave=bool(random.random() < 0.25))
    writer.line("mov.u32 tid, %tid.x; mov.u32 lane, %laneid; mov.u32 own, buffer; mad.lo.u32 own, tid, 32, own;")
    writer.line("mov.u32 other, %ntid.x; sub.u32 other, other, tid; mul.lo.u32 other, other, 32; mov.u32 e0, buffer;")
    writer.line("add.u32 other, other, e0; sub.u32 other, other, 32;")
    writer.line("mov.u32 e1, %ctaid.x; mov.u32 e2, %ntid.x; mad.lo.u32 e1, e1, e2, tid; mov.u64 place, scratch;")
    writer.line("mad.wide.u32 place, e1, 32, place;")
    kinds = {"pred": "pred", "f32": "f32", "f64": "f64"}
    for name in NAMES:
        kind = POOLS[name[0]][0]
        writer.line(f"mov.{kinds.get(kind, kind)} {name}, i_{name};")
    for n in (0, 16):
        writer.line(
            f"st.shared.v4.b32 [own+{n}], {{a0, a1, a2, a3}}; st.global.v4.b32 [place+{n}], {{a0, a1, a2, a3}};"
        )
    writer.line("setp.eq.u32 t, tid, 0;")
    for n in range(4):
        writer.line(f"@t st.shared.b32 [buffer+{COUNTERS + 4 * n}], {n}; cvt.rn.f32.u32 c{n}, lane;")
    # Fragments of small whole numbers: any order of summing them is exact.
    for n in range(6):
        writer.line(f"and.b32 e0, a{n % 4}, 0x00030003; mul.lo.u32 g{n}, e0, 0x80; or.b32 g{n}, g{n}, 0x40004000;")
    writer.line("bar.sync 0; bra start;")
    writer.block("start")
    writer.statements(int(random.integers(4, 12)), Context())
    writer.line("bra end;")
    first, *rest = writer.chunks
    order = random.permutation(len(rest))
    return "\n".join(["\n".join(first), *("\n".join(rest[n]) for n in order), "end:"])
