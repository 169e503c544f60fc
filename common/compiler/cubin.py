"""The machine code inside a cubin, without what surrounds it: two configurations are one kernel if it is the same."""

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from flashladder.common.errors import BuildError

_SHF_ALLOC = 2  # the section is part of what the GPU loads
_SHT_NOBITS = 8  # and has a size, but no content
_HEADER = struct.Struct("<IIQQQQIIQQ")  # of a section in 64-bit ELF: name, type, flags, address, offset, size, ...


@dataclass(frozen=True)
class Section:
    """A section of an ELF file. Of code, `info` holds the register count in its top byte."""

    name: str
    flags: int
    info: int
    size: int
    content: bytes


def code_digest(cubin: Path) -> str:
    """A hash of what a cubin's kernel executes: code, constants, registers and shared memory.

    Line tables and other debug information, in which two configurations always differ, are left out.
    """
    digest = hashlib.sha256()
    for section in sections(cubin):
        if section.flags & _SHF_ALLOC:
            digest.update(f"{section.name} {section.info} {section.size}\n".encode())
            digest.update(section.content)
    return digest.hexdigest()[:16]


def sections(path: Path) -> Iterator[Section]:
    """The sections of an ELF file; BuildError where it is none."""
    data = path.read_bytes()
    try:
        if data[:5] != b"\x7fELF\x02":
            raise ValueError
        (table,) = struct.unpack_from("<Q", data, 0x28)
        size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
        headers = [_HEADER.unpack_from(data, table + size * number) for number in range(count)]
        names = headers[names_at][4]
        for name, kind, flags, _, offset, length, _, info, _, _ in headers:
            title = data[names + name : data.index(b"\0", names + name)].decode()
            content = b"" if kind == _SHT_NOBITS else data[offset : offset + length]
            yield Section(title, flags, info, length, content)
    except (struct.error, ValueError, IndexError):
        raise BuildError(f"{path} is no cubin; delete its folder, and it is compiled again") from None
