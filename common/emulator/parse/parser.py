"""PTX text to a PtxKernel (PTX ISA, "Syntax", "Directives"). Knows what nvcc emits, and raises at anything else."""

import re
from collections.abc import Iterator

import numpy as np

from flashladder.common.emulator.parse.names import unescaped

from ..errors import PtxSyntaxError
from .ptx import (
    NUMPY_TYPES,
    Address,
    Imm,
    Instruction,
    Not,
    Operand,
    Pair,
    PtxKernel,
    Reg,
    Sink,
    SourceChain,
    Special,
    Symbol,
    TensorAddress,
    Variable,
    Vector,
)

_LABEL = re.compile(r"([\w$]+):(?!:)\s*")
_OPERANDS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ENTRY = re.compile(r"(?:\.\w+\s+)*\.entry\b")
_GUARD = re.compile(r"@(!?)([%\w$]+)\s+(.*)", re.S)
_LOC = re.compile(
    r"""\.loc\s+(\d+)\s+(\d+)\s+(\d+)
    (?:\s*,\s*function_name\s+[\w$]+(?:\s*\+\s*\d+)?\s*,\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?""",
    re.X,
)
_REG_RANGE = re.compile(r"([%\w$]+)<(\d+)>$")
_VARIABLE = re.compile(
    r"""(?:\.(?:visible|extern|weak|common)\s+)*
    \.(?P<space>shared|const|global|local|param)\s+ (?:\.align\s+(?P<align>\d+)\s+)?
    \.(?P<type>\w+)\s+ (?:\.ptr\s+(?:\.\w+\s+)?(?:\.align\s+\d+\s+)?)?
    (?P<name>[%\w$]+)\s* (?P<array>\[\s*(?P<count>\d*)\s*\])? \s*(?:=\s*(?P<init>.*))?$""",
    re.S | re.X,
)
_OFFSET = re.compile(r"([%\w$.]+)\s*(?:\+\s*)?(-?\s*\d+)?$")
_INTEGER = re.compile(r"-?\s*(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)U?$")
_SPECIALS = re.compile(
    r"""%(?: (?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]
    | laneid | warpid | nwarpid | smid | nsmid | gridid | clock | clock64 | globaltimer | lanemask_(?:eq|le|lt|ge|gt)
    | dynamic_smem_size | total_smem_size | cluster_ctarank | cluster_nctarank )$""",
    re.X,
)
_ENTRY_DIRECTIVE = re.compile(r"\.(maxntid|reqntid|maxnreg|minnctapersm|reqnctapercluster)\s+(\d+(?:\s*,\s*\d+)*)")
_LINE_DIRECTIVES = (".version", ".target", ".address_size", ".file", ".section", ".loc ", ".loc\t")
# Directives that say nothing about what a kernel computes.
_IGNORED = (".version", ".address_size", ".file", ".section", ".pragma")


class _Scope:
    """Names declared between a pair of braces; `suffix` keeps equal names of different blocks apart."""

    def __init__(self, outer: "_Scope | None", suffix: str) -> None:
        self.outer, self.suffix = outer, suffix
        self.regs: dict[str, Reg] = {}
        self.labels: dict[str, str] = {}
        self.cache: dict[str, Operand] = {}

    def find_reg(self, name: str) -> Reg | None:
        return self.regs.get(name) or (self.outer.find_reg(name) if self.outer else None)

    def find_label(self, name: str) -> str | None:
        return self.labels.get(name) or (self.outer.find_label(name) if self.outer else None)


def parse(text: str, entry: str | None = None) -> PtxKernel:
    """The kernel `entry` of a PTX module (the only one, if not named).

    Raises:
        PtxSyntaxError: the text is not understood, or has no such entry.
    """
    return _PtxParser(text).parse(entry)


class _PtxParser:
    def __init__(self, text: str) -> None:
        self.text = text
        files = re.findall(r'^\s*\.file\s+(\d+)\s+"((?:\\.|[^"\\])*)"', text, re.M)
        self.files = {number: unescaped(name) for number, name in files}
        self.globals: dict[str, Variable] = {}
        self.kernels: dict[str, PtxKernel] = {}
        self.target = ""
        self.line = 0

    def fail(self, message: str) -> PtxSyntaxError:
        return PtxSyntaxError(f"PTX line {self.line}: {message}")

    def parse(self, entry: str | None) -> PtxKernel:
        statements = self._statements()
        for statement in statements:
            if ".entry" in statement:
                self._entry(statement, statements)
            elif statement.startswith(".target"):
                self.target = statement.split(None, 1)[1]
            elif statement.startswith(_IGNORED):
                continue
            elif match := _VARIABLE.match(statement):
                self._declare(match, self.globals)
            else:
                raise self.fail(f"unknown statement: {statement}")
        found = sorted(self.kernels)
        if entry is None and len(found) == 1:
            entry = found[0]
        if entry not in self.kernels:
            raise PtxSyntaxError(f"no entry {entry!r} in the PTX; it has: {', '.join(found) or 'none'}")
        return self.kernels[entry]

    def _statements(self) -> Iterator[str]:
        """Statements without their `;`, scope braces and labels (as `name:`) on their own; keeps self.line."""
        text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), self.text, flags=re.S)
        pending, in_section = "", False
        for self.line, raw in enumerate(text.split("\n"), 1):
            line = raw.split("//", 1)[0].strip()
            if not pending and line.startswith(_LINE_DIRECTIVES):
                in_section = line.startswith(".section")
                yield line
                continue
            if in_section:  # debug strings, braced
                in_section = not line.startswith("}")
                continue
            while line:
                if not pending and line[0] in "{}":
                    yield line[0]
                    line = line[1:].lstrip()
                elif not pending and (label := _LABEL.match(line)):
                    yield label[1] + ":"
                    line = line[label.end() :]
                else:
                    is_head = ".entry" in pending or _ENTRY.match(line)
                    head, end, rest = line.partition("{" if is_head else ";")
                    pending = f"{pending} {head.strip()}".strip()
                    if end:
                        if pending:
                            yield pending
                        pending = ""
                    line = "{" + rest if end == "{" else rest.strip()
        if pending:
            raise self.fail(f"unfinished statement: {pending}")

    def _entry(self, head: str, statements: Iterator[str]) -> None:
        match = re.search(r"\.entry\s+([\w$]+)\s*(?:\(([^)]*)\))?", head)
        if not match:
            raise self.fail(f"unknown entry: {head}")
        kernel = PtxKernel(match[1], variables=self.globals, target=self.target)
        for name, numbers in _ENTRY_DIRECTIVE.findall(head):
            kernel.directives[name] = tuple(int(number) for number in numbers.split(","))
        for text in filter(None, (part.strip() for part in (match[2] or "").split(","))):
            param = _VARIABLE.match(text)
            if not param:
                raise self.fail(f"unknown parameter: {text}")
            self._declare(param, kernel.params)
        self.kernels[kernel.name] = kernel
        _Body(self, kernel).parse(statements)

    def _declare(self, match: re.Match[str], into: dict[str, Variable]) -> None:
        if match["type"] not in NUMPY_TYPES:
            raise self.fail(f"unknown type .{match['type']} of variable {match['name']}")
        dtype = np.dtype(NUMPY_TYPES[match["type"]])
        count = int(match["count"] or 0) if match["array"] else 1
        data = None
        if match["init"]:
            tokens = match["init"].strip("{} \t").split(",")
            values = [self._number(token.strip()) for token in tokens]
            wrapped = np.array([v.value % (1 << dtype.itemsize * 8) for v in values], np.dtype(f"u{dtype.itemsize}"))
            count = max(count, len(values))
            data = wrapped.tobytes().ljust(count * dtype.itemsize, b"\0")
        align = int(match["align"] or dtype.itemsize)
        into[match["name"]] = Variable(match["name"], match["space"], count * dtype.itemsize, align, data)

    def _number(self, token: str) -> Imm:
        if _INTEGER.match(token):
            digits = token.rstrip("U").replace(" ", "")
            return Imm(int(digits, 8 if re.match(r"-?0\d", digits) else 0))
        if token[:2] in ("0f", "0F"):
            return Imm(int(token[2:], 16), 32)
        if token[:2] in ("0d", "0D"):
            return Imm(int(token[2:], 16), 64)
        if re.match(r"-?\d+\.\d*(?:[eE][-+]?\d+)?$", token):
            return Imm(int(np.float64(token).view(np.uint64)), 64)
        raise self.fail(f"unknown value: {token}")


class _Body:
    """The statements between the braces of one entry."""

    def __init__(self, parser: _PtxParser, kernel: PtxKernel) -> None:
        self.parser, self.kernel = parser, kernel
        self.scope: _Scope | None = None
        self.num_scopes = 0
        self.source: SourceChain = ()
        self.known_sites: dict[tuple[str, str, str], SourceChain] = {}
        self.branches: list[tuple[Instruction, str, _Scope, int]] = []

    def parse(self, statements: Iterator[str]) -> None:
        for statement in statements:
            if statement == "{":
                suffix = f"#{self.num_scopes}" if self.scope else ""
                self.scope = _Scope(self.scope, suffix)
                self.num_scopes += 1
            elif statement == "}":
                assert self.scope is not None
                if self.scope.outer is None:
                    break
                self.scope = self.scope.outer
            elif statement.startswith((".loc ", ".loc\t")):
                self._location(statement)
            elif statement.startswith(_IGNORED):
                continue
            elif self.scope is None:
                raise self.parser.fail(f"unknown statement: {statement}")
            elif statement.startswith(".reg"):
                self._registers(statement, self.scope)
            elif statement.endswith(":"):
                name = statement[:-1]
                self.scope.labels[name] = name + self.scope.suffix
                self.kernel.labels[name + self.scope.suffix] = len(self.kernel.instructions)
            elif statement.startswith(".") and (match := _VARIABLE.match(statement)):
                self.kernel.variables = dict(self.kernel.variables)
                self.parser._declare(match, self.kernel.variables)
            else:
                self._instruction(statement, self.scope)
        self._resolve_labels()

    def _location(self, statement: str) -> None:
        match = _LOC.match(statement)
        if not match:
            raise self.parser.fail(f"unknown .loc: {statement}")
        file, line, column, *site = match.groups()
        if line == "0":
            return  # the compiler names no line: keep the last one
        outer: SourceChain = ()
        if site[0]:
            outer = self.known_sites.get((site[0], site[1], site[2])) or (
                (self.parser.files.get(site[0], "?"), int(site[1])),
            )
        self.source = ((self.parser.files.get(file, "?"), int(line)), *outer)
        self.known_sites[file, line, column] = self.source

    def _registers(self, statement: str, scope: _Scope) -> None:
        parts = statement.split(None, 2)
        if len(parts) != 3 or parts[1][1:] not in NUMPY_TYPES:
            raise self.parser.fail(f"unknown register declaration: {statement}")
        for name in (part.strip() for part in parts[2].split(",")):
            counted = _REG_RANGE.match(name)
            names = [f"{counted[1]}{i}" for i in range(int(counted[2]))] if counted else [name]
            for each in names:
                scope.regs[each] = Reg(each + scope.suffix, parts[1][1:])

    def _instruction(self, statement: str, scope: _Scope) -> None:
        guard, negated = None, False
        text = statement
        if statement[0] == "@":
            match = _GUARD.match(statement)
            guard = scope.find_reg(match[2]) if match else None
            if not match or guard is None:
                raise self.parser.fail(f"unknown guard: {statement}")
            negated, text = bool(match[1]), match[3]
        opcode, _, rest = text.partition(" ") if "\t" not in text else text.replace("\t", " ").partition(" ")
        index = len(self.kernel.instructions)
        instruction = Instruction(
            index, opcode, (), guard, negated, self.parser.line, " ".join(statement.split()), self.source
        )
        self.kernel.instructions.append(instruction)
        if opcode.startswith("bra"):
            self.branches.append((instruction, rest.strip(), scope, self.parser.line))
            return
        try:
            instruction.operands = tuple(self._operand(token.strip(), scope) for token in _OPERANDS.findall(rest))
        except KeyError as error:
            raise self.parser.fail(f"unknown operand {error.args[0]} in: {statement}") from None

    def _operand(self, token: str, scope: _Scope) -> Operand:
        found = scope.cache.get(token)
        if found is None:
            found = scope.cache[token] = self._parse_operand(token, scope)
        return found

    def _parse_operand(self, token: str, scope: _Scope) -> Operand:
        first = token[0]
        if first == "{":
            return Vector(tuple(self._operand(item.strip(), scope) for item in token[1:-1].split(",")))
        if first == "[" and "{" in token:
            tensor, _, coordinates = token[1:-1].partition(",")
            found = self._operand(coordinates.strip(), scope)
            assert isinstance(found, Vector)
            return TensorAddress(self._parse_operand(f"[{tensor.strip()}]", scope), found)
        if first == "[":
            inner = self._parse_operand(token[1:-1].strip(), scope)
            if isinstance(inner, Symbol):
                return Address(Symbol(inner.name), inner.offset)
            if isinstance(inner, Address):
                return inner
            if isinstance(inner, (Reg, Imm)):
                return Address(inner)
            raise KeyError(token)
        if token == "_":
            return Sink()
        if reg := scope.find_reg(token):
            return reg
        if first == "!" and (reg := scope.find_reg(token[1:])):
            return Not(reg)
        if "|" in token:
            left, _, right = token.partition("|")
            return Pair(self._operand(left.strip(), scope), self._operand(right.strip(), scope))
        if token == "WARP_SZ":
            return Imm(32)
        if first == "%" and _SPECIALS.match(token):
            return Special(token)
        if first.isdigit() or first == "-":
            return self.parser._number(token)
        match = _OFFSET.match(token)
        if not match:
            raise KeyError(token)
        offset = int((match[2] or "0").replace(" ", ""))
        if reg := scope.find_reg(match[1]):
            return Address(reg, offset)
        if match[1] not in self.kernel.variables and match[1] not in self.kernel.params:
            raise KeyError(token)
        return Symbol(match[1], offset)

    def _resolve_labels(self) -> None:
        """Branch targets, by the scope they are named in: labels of inline asm may come after their use."""
        for instruction, name, scope, line in self.branches:
            target = scope.find_label(name)
            if target is None:
                self.parser.line = line
                raise self.parser.fail(f"unknown label {name}")
            instruction.operands = (Symbol(target),)
