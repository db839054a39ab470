"""How the matrix of one module is stored in a folder, and how it becomes a `GroupedMatrix`.

Which way a module has is told by the tensors that there are under its name. So what a config lists as not quantized is
honoured for experts, routers and fused matrices alike, however the list spells them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface.families.family import Place
from shardline.stage.huggingface.folder import Folder
from shardline.stage.huggingface.formats import Format, Mxfp4Format, Scheme, mxfp4_matrix, quantize, quantized_bytes
from shardline.stage.huggingface.header import TensorInfo

FLOATS = ("F32", "F16", "BF16")

# What NumPy has for a dtype; bfloat16, which it has nothing for, is read as the integers that its bits are.
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2", "I32": "<i4", "I64": "<i8", "I8": "<i1", "U8": "<u1"}

# Bytes of a tensor of floats that are read at a time.
_PIECE = 1 << 24


class Storage(Protocol):
    """One module's matrix, of one expert if it has several."""

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it is made of."""
        ...

    def shape(self) -> tuple[int, int]:
        """(N, K) of the module, from headers. Raises ValueError: a tensor is of another type or form."""
        ...

    def nbytes(self, shape: tuple[int, int]) -> int:
        """What `GroupedMatrix.nbytes` of N of its output channels will be."""
        ...

    def matrix(self, rows: slice) -> GroupedMatrix:
        """Some output channels of the module. Raises ValueError, CheckpointError."""
        ...


def find_storage(
    folder: Folder,
    format: Format | None,
    place: Place,
    module: str,
    expert: int | None,
    form: tuple[int, int] = (4, 32),
) -> Storage:
    """How that module is stored.

    Args:
        folder: The files.
        format: Of the modules that are quantized; None: none are.
        place: Of the role.
        module: Its full name.
        expert: Which of those that a stacked tensor holds.
        form: Bits and group size that it is quantized to if it is of floats.

    Raises:
        CheckpointError: there is nothing of it, or more than one form.
    """
    plain = f"{module}.{place.suffix}" if place.suffix else module
    found: list[Storage] = []
    if plain in folder.shards:
        stacked = place.stacked and expert is not None
        found.append(StackedFloats(folder, plain, form, expert or 0) if stacked else Floats(folder, plain, form))
    if isinstance(format, Mxfp4Format):
        names = tuple(f"{module}_{part}" for part in format.tensors)
        if place.stacked and names[0] in folder.shards:
            found.append(Mxfp4(folder, format, names, expert or 0))
    elif format is not None and not place.stacked and f"{module}.{format.tensors[0]}" in folder.shards:
        found.append(_packed(folder, format, module))
    if len(found) > 1:
        raise CheckpointError(folder.path, f"tensor {found[0].names[0]}", f"is there, and so is {found[1].names[0]}")
    if not found:
        problem = "is missing"
        if format is None and (other := next((n for n in _quantized_names(module) if n in folder.shards), None)):
            problem += f"; there is {other}, but config.json has no quantization_config that says how to read it"
        raise CheckpointError(folder.path, f"tensor {plain}", problem)
    for name in found[0].names:
        if name not in folder.shards:
            raise CheckpointError(folder.path, f"tensor {name}", f"is missing, but {found[0].names[0]} is there")
    return found[0]


def _quantized_names(module: str) -> tuple[str, ...]:
    return f"{module}.qweight", f"{module}.weight_packed", f"{module}_blocks"


def _packed(folder: Folder, format: Any, module: str) -> Packed:
    try:
        scheme = format.scheme(module)
    except ValueError as error:
        raise CheckpointError(folder.path / "config.json", "quantization_config", str(error)) from None
    if scheme is None:
        raise CheckpointError(
            folder.path,
            f"tensor {module}.{format.tensors[0]}",
            "is quantized, but config.json's quantization_config says that this module is not",
        )
    return Packed(folder, format, scheme, module)


class Floats:
    """A tensor [N, K] of floats, quantized as it is read."""

    def __init__(self, folder: Folder, name: str, form: tuple[int, int]) -> None:
        self._folder, self._name, self._form = folder, name, form

    @property
    def names(self) -> tuple[str, ...]:
        return (self._name,)

    def shape(self) -> tuple[int, int]:
        info = float_info(self._folder, self._name)
        if len(info.shape) != 2:
            raise ValueError(f"has shape {list(info.shape)}, not a matrix's")
        return info.shape[0], info.shape[1]

    def nbytes(self, shape: tuple[int, int]) -> int:
        return quantized_bytes(shape, *self._form)

    def matrix(self, rows: slice) -> GroupedMatrix:
        info = self._folder.info(self._name)
        chosen = range(info.shape[0])[rows]
        assert chosen.step == 1, rows
        return quantize(self._pieces(info, chosen), (len(chosen), info.shape[1]), *self._form, _cores())

    def _pieces(self, info: TensorInfo, chosen: range) -> Iterator[NDArray[Any]]:
        row_bytes = info.nbytes // info.shape[0]
        step = max(1, _PIECE // row_bytes)
        for start in range(chosen.start, chosen.stop, step):
            count = min(step, chosen.stop - start)
            raw = self._folder.read(self._name, start * row_bytes, count * row_bytes)
            yield raw.view(_DTYPES[info.dtype]).reshape(count, -1)


class StackedFloats:
    """One expert's [K, N] of a tensor [experts, K, N] of floats, quantized as it is read."""

    def __init__(self, folder: Folder, name: str, form: tuple[int, int], expert: int) -> None:
        self._folder, self._name, self._form, self._expert = folder, name, form, expert

    @property
    def names(self) -> tuple[str, ...]:
        return (self._name,)

    def shape(self) -> tuple[int, int]:
        info = float_info(self._folder, self._name)
        check_experts(info, self._expert, 3)
        return info.shape[2], info.shape[1]

    def nbytes(self, shape: tuple[int, int]) -> int:
        return quantized_bytes(shape, *self._form)

    def matrix(self, rows: slice) -> GroupedMatrix:
        info = self._folder.info(self._name)
        values = np.ascontiguousarray(one_expert(self._folder, self._name, self._expert).T[rows])
        return quantize([values], (values.shape[0], info.shape[1]), *self._form, _cores())


class Packed:
    """A module of integers, as GPTQ, AWQ or compressed-tensors pack them."""

    def __init__(self, folder: Folder, format: Any, scheme: Scheme, module: str) -> None:
        self._folder, self._format, self._scheme, self._module = folder, format, scheme, module

    @property
    def names(self) -> tuple[str, ...]:
        optional = (name for name in self._format.optional_tensors if f"{self._module}.{name}" in self._folder.shards)
        return tuple(f"{self._module}.{name}" for name in (*self._format.tensors, *optional))

    def shape(self) -> tuple[int, int]:
        shapes = {}
        for name in self.names:
            info = self._folder.info(name)
            if info.dtype not in _DTYPES:
                raise ValueError(f"{name} is of the type {info.dtype}, which is not supported")
            shapes[name.rpartition(".")[2]] = info.shape
        shape: tuple[int, int] = self._format.shape(self._scheme, shapes)
        return shape

    def nbytes(self, shape: tuple[int, int]) -> int:
        scales = next(name for name in self._format.tensors if "scale" in name)
        return self._scheme.nbytes(shape, self._folder.info(f"{self._module}.{scales}").dtype)

    def matrix(self, rows: slice) -> GroupedMatrix:
        tensors = {name.rpartition(".")[2]: whole(self._folder, name) for name in self.names}
        return rows_of(self._format.matrix(self._scheme, tensors), rows)


class Mxfp4:
    """One expert of gpt-oss's blocks and scales."""

    def __init__(self, folder: Folder, format: Mxfp4Format, names: tuple[str, ...], expert: int) -> None:
        self.names, self._folder, self._format, self._expert = names, folder, format, expert

    def shape(self) -> tuple[int, int]:
        for name, dimensions in zip(self.names, (4, 3), strict=True):
            info = self._folder.info(name)
            if info.dtype != "U8":
                raise ValueError(f"{name} is of the type {info.dtype}, not U8")
            check_experts(info, self._expert, dimensions)
        blocks = self._folder.info(self.names[0]).shape
        return blocks[1], blocks[2] * 32

    def nbytes(self, shape: tuple[int, int]) -> int:
        return self._format.nbytes(shape)

    def matrix(self, rows: slice) -> GroupedMatrix:
        blocks, scales = (one_expert(self._folder, name, self._expert)[rows] for name in self.names)
        return mxfp4_matrix(blocks, scales)


def float_info(folder: Folder, name: str) -> TensorInfo:
    """The place of a tensor of floats. Raises ValueError: it is of others."""
    info = folder.info(name)
    if info.dtype not in FLOATS:
        raise ValueError(f"the type {info.dtype} is not supported; {', '.join(FLOATS)} are")
    return info


def check_experts(info: TensorInfo, expert: int, dimensions: int) -> None:
    """Check that a tensor has an entry for that expert. Raises ValueError."""
    if len(info.shape) != dimensions or info.shape[0] <= expert:
        raise ValueError(f"{shown(info.name)} has shape {list(info.shape)}, which has no expert {expert}")


def whole(folder: Folder, name: str) -> NDArray[Any]:
    """A whole tensor as the array that its bytes are."""
    info = folder.info(name)
    return folder.read(name, 0, info.nbytes).view(_DTYPES[info.dtype]).reshape(info.shape)


def one_expert(folder: Folder, name: str, expert: int) -> NDArray[Any]:
    """One entry along a tensor's first axis."""
    info = folder.info(name)
    count = info.nbytes // info.shape[0]
    return folder.read(name, expert * count, count).view(_DTYPES[info.dtype]).reshape(info.shape[1:])


def rows_of(matrix: GroupedMatrix, rows: slice) -> GroupedMatrix:
    """Some output channels of a matrix."""
    if rows == slice(None):
        return matrix
    parts: dict[str, Any] = {
        name: np.ascontiguousarray(part[rows])
        for name, part in (("q", matrix.q), ("scale", matrix.scale), ("minimum", matrix.minimum))
    }
    return replace(matrix, **parts)


def _cores() -> int:
    return len(os.sched_getaffinity(0))
