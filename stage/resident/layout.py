"""What a resident folder holds: one safetensors file a layer, one for the rest, and `shardline.json`.

A matrix is four tensors: `ROLE.q`, `ROLE.scale` and `ROLE.minimum` as in `GroupedMatrix`, and `ROLE.order` where its
columns have one. Those of a layer's experts are stacked, so that one expert is a slice of each; experts that differ in
form lie apart, as `ROLE.EXPERT.q` and so on. A float tensor is `ROLE`. Nothing is named by the folder itself: the names
of files and tensors, and all shapes, follow from the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardline.kernels import GROUP_SIZES, GroupedMatrix
from shardline.stage.roles import EXPERT_ROLES, matrix_shapes, vector_shapes
from shardline.stage.spec import ModelSpec

MANIFEST = "shardline.json"

METADATA = "metadata.json"
"""The key-value pairs that a GGUF file's tokenizer is built from."""

FORMAT = 1

SCALE_TYPES = {"F16": "float16", "F32": "float32"}
_SCALE_BYTES = {"F16": 2, "F32": 4}


@dataclass(frozen=True, slots=True)
class Form:
    """How a matrix is stored: what its role and the model do not say.

    Attributes:
        bits, group_size: As in `GroupedMatrix`.
        scale: The type of scales and minimums, as safetensors names it.
        ordered: Its columns have an order.
    """

    bits: int
    group_size: int
    scale: str
    ordered: bool

    @classmethod
    def of(cls, matrix: GroupedMatrix) -> Form:
        """A matrix's."""
        scale = next(name for name, dtype in SCALE_TYPES.items() if matrix.scale.dtype == dtype)
        return cls(matrix.bits, matrix.group_size, scale, matrix.input_order is not None)

    def problem(self, inputs: int) -> str | None:
        """Why no matrix with that many input channels has it."""
        if self.bits not in (4, 8):
            return f"bits {self.bits}: 4 and 8 are known"
        if self.group_size not in GROUP_SIZES:
            return f"group_size {self.group_size}: {', '.join(map(str, GROUP_SIZES))} are known"
        if self.scale not in SCALE_TYPES:
            return f"scale {self.scale}: {' and '.join(SCALE_TYPES)} are known"
        if inputs % self.group_size:
            return f"group_size {self.group_size} does not divide the {inputs} input channels"
        return None

    def nbytes(self, shape: tuple[int, int]) -> int:
        """`GroupedMatrix.nbytes` of a matrix (N, K)."""
        n, k = shape
        return n * k * self.bits // 8 + 2 * n * (k // self.group_size) * _SCALE_BYTES[self.scale]

    def tensors(self, shape: tuple[int, int]) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The type and shape of each tensor that a matrix (N, K) is made of."""
        n, k = shape
        scales = n, k // self.group_size
        made: dict[str, tuple[str, tuple[int, ...]]] = {
            "q": ("U8", (n, k * self.bits // 8)),
            "scale": (self.scale, scales),
            "minimum": (self.scale, scales),
        }
        return made | {"order": ("I32", (k,))} if self.ordered else made


Forms = Mapping[str, Sequence[Form]]
"""Role -> the form of its matrix; of an expert role one for all, or one an expert."""


def file_name(layer: int | None) -> str:
    """The file of a layer, or (None) of the embedding, the head and the final norm."""
    return "ends.safetensors" if layer is None else f"layer-{layer:05}.safetensors"


def file_names(spec: ModelSpec) -> dict[str, int | None]:
    """All files of a model, and which layer each is of."""
    return {file_name(layer): layer for layer in (None, *range(spec.num_layers))}


def tensors(spec: ModelSpec, layer: int | None, forms: Forms) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> type and shape of each tensor that a file has, and it has no other."""
    made: dict[str, tuple[str, tuple[int, ...]]] = {}
    for role, shape in matrix_shapes(spec, layer).items():
        kinds = forms[role]
        stacked = (spec.experts.num_experts,) if spec.experts and role in EXPERT_ROLES and len(kinds) == 1 else ()
        for index, form in enumerate(kinds):
            name = role if len(kinds) == 1 else f"{role}.{index}"
            for part, (dtype, part_shape) in form.tensors(shape).items():
                made[f"{name}.{part}"] = dtype, (*stacked, *part_shape)
    for role, vector_shape in vector_shapes(spec, layer).items():
        made[role] = "F32", vector_shape
    return made
