"""What a user may ask of a stage, whichever command or program it is for."""

from __future__ import annotations

import re

from shardline.scheduler import InvalidParameterError

MAX_THREADS = 1024


def check_stage_options(*, kv_dtype: str, threads: int | None, device: str, block_size: int) -> None:
    """Raise InvalidParameterError for what no stage could be. `threads` None stands for the cores that there are."""
    if block_size not in (8, 16, 32, 64, 128, 256):
        raise InvalidParameterError("block_size", block_size, "a power of two from 8 to 256")
    if kv_dtype not in ("float16", "float32", "int8"):
        raise InvalidParameterError("kv_dtype", kv_dtype, "float16, float32 or int8")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise InvalidParameterError("threads", threads, f"an integer from 1 to {MAX_THREADS}")
    if device == "cpu":
        return
    if not re.fullmatch(r"cuda:\d+", device):
        raise InvalidParameterError("device", device, "cpu, or cuda:0, cuda:1, ... for a GPU")
    if kv_dtype == "float32":
        raise InvalidParameterError("kv_dtype", kv_dtype, "float16 or int8 on a GPU")


def gpu_numbers(device: str) -> tuple[int, ...]:
    """Of "cuda:0,cuda:2" the numbers; none for "gpu", which stands for all of them. Raises InvalidParameterError."""
    if device == "gpu":
        return ()
    parts = device.split(",")
    if not all(re.fullmatch(r"cuda:\d+", part) for part in parts) or len(set(parts)) != len(parts):
        allowed = "cpu; cuda:N or a list such as cuda:0,cuda:1 for GPUs here; or gpu for all of the cluster"
        raise InvalidParameterError("device", device, allowed)
    return tuple(int(part.removeprefix("cuda:")) for part in parts)
