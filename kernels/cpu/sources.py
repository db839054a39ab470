"""What this folder's sources were before any of them was read: compiled code is theirs only as long as they stay so.

A process reads each module at its first import and compiles its functions later. If an edit or an upgrade comes in
between, it has the code of neither the old sources nor the new ones.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def digest() -> str:
    """A hash of the sources as they are now."""
    parts = hashlib.sha256()
    for path in sorted(FOLDER.glob("*.py")):
        parts.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return parts.hexdigest()


_AT_IMPORT = digest()


def at_import() -> str:
    """The hash when this was imported, before every other module of the folder."""
    return _AT_IMPORT


def changed() -> bool:
    """Whether they are no longer what they were."""
    return digest() != _AT_IMPORT
