"""Vendor libraries that are mapped into this process. Imports no cupy."""

from __future__ import annotations

import re
from pathlib import Path

VENDOR = ("cublas", "cublasLt", "cudnn", "cufft", "curand", "cusolver", "cusparse", "cutensor", "nccl")
"""Of linear algebra, networks, transforms, random numbers and transfers: none of them takes part in a step."""

_NAME = re.compile(r"/lib(" + "|".join(VENDOR) + r")[^/]*\.so[^/]*$")


def vendor_libraries(maps: str | None = None) -> set[str]:
    """Paths of them. maps: As in /proc/self/maps, which is read without."""
    text = Path("/proc/self/maps").read_text() if maps is None else maps
    # The sixth field is the path, which may have blanks in it.
    paths = {fields[5] for line in text.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    return {path for path in paths if _NAME.search(path.removesuffix(" (deleted)"))}
