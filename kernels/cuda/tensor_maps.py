"""Descriptions of resident tensors for Hopper's tensor memory accelerator, which wide.cuh's copies go through."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from shardline.kernels.cuda.cupy_import import cupy
from shardline.kernels.cuda.errors import LaunchError
from shardline.kernels.cuda.tables import TENSOR_MAP_BYTES

_UINT64 = 4  # CU_TENSOR_MAP_DATA_TYPE_UINT64
_L2_256_BYTES = 3  # CU_TENSOR_MAP_L2_PROMOTION_L2_256B
_ELEMENT = 8


def tensor_maps(tables: Sequence[tuple[int, int, int, int, int]]) -> Any:
    """One description after the other, uint8 on the device; uploaded on the current stream, which is waited for.

    tables: Of each (address, rows, bytes of a row, rows of a box, bytes of a box's row). What a box has past the end is
        zeros. Raises LaunchError with the driver's code.
    """
    room = np.zeros((len(tables) + 1) * TENSOR_MAP_BYTES, np.uint8)
    first = -room.ctypes.data % TENSOR_MAP_BYTES
    for place, (address, rows, row_bytes, box_rows, box_bytes) in enumerate(tables):
        code = _encoder()(
            room.ctypes.data + first + place * TENSOR_MAP_BYTES,
            _UINT64,
            2,
            address,
            (ctypes.c_uint64 * 2)(row_bytes // _ELEMENT, rows),
            (ctypes.c_uint64 * 1)(row_bytes),
            (ctypes.c_uint32 * 2)(box_bytes // _ELEMENT, box_rows),
            (ctypes.c_uint32 * 2)(1, 1),
            0,
            0,
            _L2_256_BYTES,
            0,
        )
        if code:
            boxes = f"{rows} rows of {row_bytes} bytes in boxes of {box_rows} x {box_bytes}"
            raise LaunchError(f"the driver refused to describe {boxes}: CUresult {code}")
    return cupy.asarray(room[first : first + len(tables) * TENSOR_MAP_BYTES])


@cache
def _encoder() -> Any:
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    p, i = ctypes.c_void_p, ctypes.c_int
    encode.argtypes = [p, i, ctypes.c_uint32, p, p, p, p, p, i, i, i, i]
    return encode
