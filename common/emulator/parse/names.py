"""Names of files as PTX and nvdisasm spell them."""

import os


def unescaped(name: str) -> str:
    """A file's name in PTX or in nvdisasm's text, where it has C's escapes: what is not ASCII is in octal."""
    return os.fsdecode(os.fsencode(name).decode("unicode_escape").encode("latin-1")) if "\\" in name else name
