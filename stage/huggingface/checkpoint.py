"""A Hugging Face folder as a `Checkpoint`."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardline.kernels import GroupedMatrix
from shardline.stage.errors import CheckpointError, shown
from shardline.stage.huggingface import storage
from shardline.stage.huggingface.config import Config, read_config
from shardline.stage.huggingface.families import MODEL, Place
from shardline.stage.huggingface.folder import Folder
from shardline.stage.huggingface.storage import Storage, find_storage
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes
from shardline.stage.spec import ModelSpec

_logger = logging.getLogger(__name__)

# Bytes of two tensors that are compared at a time.
_PIECE = 1 << 22

# Vectors that are the weight of a linear module, and so may be quantized with the others.
_LINEAR_VECTORS = ("router", "shared_expert_gate")


class HuggingFaceCheckpoint:
    """See `Checkpoint`. A folder with config.json and safetensors files, whole or in shards.

    Opening reads config.json and says which tensors there must be; a shard is opened, and the tensors of a layer are
    checked, when something of that layer is first asked for. Code that a folder brings is never run.

    Args:
        path: The folder.
        bits, group_size: What the layers' matrices are quantized to where the folder's weights are floats.

    Raises:
        CheckpointError: a file cannot be read, is damaged, or holds what is not supported.
    """

    path: Path
    spec: ModelSpec

    def __init__(self, path: Path, bits: int = 4, group_size: int = 32) -> None:
        self.path = path
        self._bits, self._group_size = bits, group_size
        self._config: Config = read_config(path)
        self._checked: set[int | str] = set()
        self._fingerprint: str | None = None
        self._told_of_floats = False
        self._folder = Folder(path)
        try:
            self._prefix, self._head = self._names_of_model()
            tied = self._is_tied()
            self.spec = replace(self._config.spec, tied_embeddings=tied)
            self._refuse_unused()
        except BaseException:
            self.close()
            raise

    @property
    def is_quantized(self) -> bool:
        """Whether its weights are integers already, so that `bits` and `group_size` say nothing of them."""
        return self._config.format is not None

    @property
    def text_folder(self) -> Path | None:
        """See `Checkpoint`."""
        return self.path

    @property
    def metadata(self) -> Mapping[str, Any]:
        """See `Checkpoint`."""
        return {}

    @property
    def fingerprint(self) -> str:
        """See `Checkpoint`. Read at the first use, while the folder is open; needs every shard."""
        if self._fingerprint is None:
            self._fingerprint = hashlib.sha256(self._config.raw + self._folder.digest()).hexdigest()[:16]
        return self._fingerprint

    def matrix_bytes(self, role: str, layer: int | None) -> int:
        """See `Checkpoint`."""
        role = self._stored_role(role)
        self._check(role, layer)
        shape = matrix_shapes(self.spec, layer)[role]
        return sum(self._storage(role, layer, expert).nbytes(shape) for expert in self._experts(role))

    def matrix(self, role: str, layer: int | None, expert: int | None = None) -> GroupedMatrix:
        """See `Checkpoint`. Matrices of floats are quantized, with a warning at the first."""
        role = self._stored_role(role)
        assert (expert is not None) == (role in EXPERT_ROLES), (role, expert)
        self._check(role, layer)
        found = self._storage(role, layer, expert)
        if isinstance(found, storage.Floats | storage.StackedFloats):
            self._tell_of_floats(found.names[0])
        try:
            return found.matrix(self._rows(role, layer))
        except ValueError as error:
            raise self._error(found.names[0], str(error)) from None

    def vector(self, role: str, layer: int | None) -> NDArray[np.float32]:
        """See `Checkpoint`."""
        self._check(role, layer)
        shape = vector_shapes(self.spec, layer)[role]
        name = self._vector_name(role, layer)
        if name not in self._folder.shards:
            return self._storage(role, layer, None).matrix(slice(None)).dequantize().reshape(shape)
        values = storage.whole(self._folder, name)
        if values.dtype == np.uint16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        values = values.astype(np.float32)
        if not np.isfinite(values).all():
            raise self._error(name, "an element is not a finite number")
        place = self._place(role, layer)
        if place.interleaved:
            values = np.ascontiguousarray(values[..., place.parts.index(role) :: len(place.parts)])
        values = values.reshape(shape)
        if role.endswith("_norm") and self._config.family.norm_offset:
            values = values + np.float32(self._config.family.norm_offset)
        return values

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._folder.close()

    # -- names -------------------------------------------------------------------------------------------------------

    def _names_of_model(self) -> tuple[str, str]:
        """What precedes the names of tensors, and the head's name."""
        prefixes = self._config.family.prefixes
        for prefix, head in prefixes:
            if any(name.startswith(f"{prefix}{MODEL['embed'].module}.") for name in self._folder.shards):
                return prefix, head
        raise self._error(f"{prefixes[0][0]}{MODEL['embed'].module}.weight", "is missing")

    def _place(self, role: str, layer: int | None) -> Place:
        if role == "head":
            return Place(self._head)
        return MODEL[role] if layer is None else self._config.family.layer[role]

    def _module(self, role: str, layer: int | None, expert: int | None = None) -> str:
        if role == "head":
            return self._head
        within = "" if layer is None else f"layers.{layer}."
        return self._prefix + within + self._place(role, layer).module.replace("{}", str(expert))

    def _vector_name(self, role: str, layer: int | None) -> str:
        suffix = self._place(role, layer).suffix
        return self._module(role, layer) + ("." + suffix if suffix else "")

    def _stored_role(self, role: str) -> str:
        return "embed" if role == "head" and self.spec.tied_embeddings else role

    def _experts(self, role: str) -> Iterator[int | None]:
        if role not in EXPERT_ROLES:
            return iter((None,))
        assert self.spec.experts is not None
        return iter(range(self.spec.experts.num_experts))

    def _storage(self, role: str, layer: int | None, expert: int | None) -> Storage:
        # What a quantized model keeps as floats is what it is sensitive to.
        bits = 8 if layer is None or self._config.format is not None else self._bits
        module = self._module(role, layer, expert)
        form = bits, self._group_size
        return find_storage(self._folder, self._config.format, self._place(role, layer), module, expert, form)

    def _rows(self, role: str, layer: int | None) -> slice:
        """Which output channels of its module a role is."""
        place = self._place(role, layer)
        if not place.parts:
            return slice(None)
        index = place.parts.index(role)
        if place.interleaved:
            return slice(index, None, len(place.parts))
        shapes = matrix_shapes(self.spec, layer)
        start = sum(shapes[part][0] for part in place.parts[:index])
        return slice(start, start + shapes[role][0])

    # -- checks ------------------------------------------------------------------------------------------------------

    def _is_tied(self) -> bool:
        """Whether the head is the embedding: as config.json says, unless the folder has a head that is another."""
        said = self._config.spec.tied_embeddings
        head = [name for name in self._folder.shards if name.startswith(f"{self._head}.")]
        if not head and not said:
            raise self._error(
                f"{self._head}.weight",
                "is missing, and config.json does not say that the head is the embedding: if it is, set "
                "tie_word_embeddings to true there",
            )
        if not head or not said:
            return said
        embed = f"{self._prefix}{MODEL['embed'].module}.weight"
        if head != [f"{self._head}.weight"] or embed not in self._folder.shards:
            return False
        infos = self._folder.info(head[0]), self._folder.info(embed)
        if (infos[0].dtype, infos[0].shape) == (infos[1].dtype, infos[1].shape):
            pieces = range(0, infos[0].nbytes, _PIECE)
            counts = (min(_PIECE, infos[0].nbytes - start) for start in pieces)
            if all(
                np.array_equal(self._folder.read(head[0], start, count), self._folder.read(embed, start, count))
                for start, count in zip(pieces, counts, strict=True)
            ):
                return True
        _logger.warning(
            "%s: config.json says that the head is the embedding, but %s is another matrix, and is used",
            self.path,
            head[0],
        )
        return False

    def _refuse_unused(self) -> None:
        """Every tensor that the model needs is there, and no other."""
        used: set[str] = set()
        if self.spec.tied_embeddings:
            used.add(f"{self._head}.weight")
        for layer in (None, *range(self.spec.num_layers)):
            for role in vector_shapes(self.spec, layer):
                used.update(self._vector_names(role, layer))
            for role in matrix_shapes(self.spec, layer):
                for expert in self._experts(role):
                    used.update(self._storage(role, layer, expert).names)
                    used.update(self._idle_bias(role, layer, expert))
        unused = self._config.family.unused(self._config.keys, self.spec)
        for name in self._folder.shards:
            if name not in used and not name.startswith(unused) and not name.endswith(".rotary_emb.inv_freq"):
                raise self._error(name, f"is not part of a {self._config.family.architecture} that is supported")

    def _idle_bias(self, role: str, layer: int | None, expert: int | None) -> tuple[str, ...]:
        """A bias that the model has not: some writers give every quantized module one, of zeros."""
        name = f"{self._module(role, layer, expert)}.bias"
        if name not in self._folder.shards or f"{role}_bias" in vector_shapes(self.spec, layer):
            return ()
        return (name,) if isinstance(self._storage(role, layer, expert), storage.Packed) else ()

    def _vector_names(self, role: str, layer: int | None) -> tuple[str, ...]:
        name = self._vector_name(role, layer)
        if name in self._folder.shards:
            return (name,)
        if role in _LINEAR_VECTORS:
            return self._storage(role, layer, None).names
        raise self._error(name, "is missing")

    def _check(self, role: str, layer: int | None) -> None:
        """Check shapes and types of all tensors of a layer, or of a role of the model's own, once."""
        if (key := role if layer is None else layer) in self._checked:
            return
        matrices, vectors = matrix_shapes(self.spec, layer), vector_shapes(self.spec, layer)
        for other, shape in matrices.items():
            if layer is not None or other == role:
                for expert in self._experts(other):
                    self._check_matrix(other, layer, expert, shape)
        for other, vector_shape in vectors.items():
            if layer is not None or other == role:
                self._check_vector(other, layer, vector_shape)
        self._checked.add(key)

    def _check_matrix(self, role: str, layer: int | None, expert: int | None, shape: tuple[int, int]) -> None:
        found = self._storage(role, layer, expert)
        place = self._place(role, layer)
        if place.parts:
            shapes = matrix_shapes(self.spec, layer)
            shape = sum(shapes[part][0] for part in place.parts), shape[1]
        try:
            if found.shape() != shape:
                raise ValueError(f"is a matrix {list(found.shape())}; config.json says {list(shape)}")
            if shape[1] % 32:
                raise ValueError(f"has {shape[1]} input channels, which is not a multiple of 32")
            found.nbytes(shape)
        except ValueError as error:
            raise self._error(found.names[0], str(error)) from None
        for name in self._idle_bias(role, layer, expert):
            if self._folder.read(name, 0, self._folder.info(name).nbytes).any():
                raise self._error(name, f"is not zero, but {self._config.family.architecture} has no bias there")

    def _check_vector(self, role: str, layer: int | None, shape: tuple[int, ...]) -> None:
        name = self._vector_name(role, layer)
        if name not in self._folder.shards:
            assert role in _LINEAR_VECTORS, role
            self._check_matrix(role, layer, None, (math.prod(shape[:-1]), shape[-1]))
            return
        place = self._place(role, layer)
        if place.parts:
            shape = (*shape[:-1], shape[-1] * len(place.parts))
        try:
            found = storage.float_info(self._folder, name).shape
        except ValueError as error:
            raise self._error(name, str(error)) from None
        # A gate of one output channel is a matrix of one row.
        if found != shape and not (role in _LINEAR_VECTORS and found == (1, *shape)):
            raise self._error(name, f"has shape {list(found)}; config.json says {list(shape)}")

    def _tell_of_floats(self, name: str) -> None:
        if self._told_of_floats:
            return
        self._told_of_floats = True
        bits = (
            f"to {self._bits} bits in the layers, to 8 in the embedding and the head"
            if self._config.format is None
            else "to 8 bits"
        )
        _logger.warning(
            "%s: %s and maybe other matrices are floats; they are quantized %s, in groups of %d, as they are read, so "
            "the model is not exactly the folder's",
            self.path,
            name,
            bits,
            self._group_size,
        )

    def _error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(self.path, f"tensor {shown(name)}", problem)
