"""What every backend does: the ops of one decoder, on arrays of its own device.

Ops are *enqueued* in order and return nothing; `read` and `sample` wait for what was enqueued before them, `read_later`
and `sample_later` leave the wait to a `Pending`, and what is enqueued in the meantime changes nothing of it. Arrays are
the device's own (NumPy for the CPU), float32 and C-contiguous unless an op says otherwise. An output never overlaps an
input unless the op says so. Every op keeps the bit contract: a row's result is a function of that row, its own
sequence's keys and values, and the weights; never of the other rows, their number, or the thread count.

Shapes use: rows (tokens of the step), K and N (input and output channels), D (head dim), Hq and Hkv (heads).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from shardline.kernels.experts import Activation, Expert, RouterRule
from shardline.kernels.matrix import GroupedMatrix
from shardline.kernels.sampling import SampleOutput, SamplingBatch

Array = Any
"""An array of the backend's device."""

Weight = Any
"""Matrices in the backend's resident layout; made by `load_matrix`, `load_gated` or `load_experts`, opaque to everyone
else."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The shape of one stage's paged pool of keys and values.

    Attributes:
        num_layers: Layers of this stage; ops name them from 0.
        num_blocks: Blocks a layer; a block id is the same in every layer.
        block_size: Tokens a block: a power of two from 8 to 256.
        num_kv_heads: Hkv.
        head_dim: D.
        dtype: "float32", "float16" or "int8". Of int8 each head of a key or value, once it is turned, is stored as q
            and one float16 scale s, and is q * s exactly. s is the least float16 with 127 s >= max |x|, and at most
            512: larger numbers are held at 127 * 512. q = x / s, rounded to the nearest, ties to even. A head of zeros
            has s = 0, one with a NaN or an infinity q = 0 and s = NaN.
    """

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        heads = 2 * self.num_layers * self.num_blocks * self.block_size * self.num_kv_heads
        return heads * kv_head_bytes(self.head_dim, self.dtype)


def kv_head_bytes(head_dim: int, dtype: str) -> int:
    """Bytes of one head of a key or a value in a pool of that dtype, its scale included."""
    return head_dim * np.dtype(dtype).itemsize + (SCALE_BYTES if dtype == "int8" else 0)


SCALE_BYTES = 2
"""A float16."""


KVCache = Any
"""A pool in the backend's own arrangement, zero-filled; made by `allocate_kv`."""


@dataclass(frozen=True, slots=True)
class RopeTable:
    """Rotary embedding by absolute position.

    Attributes:
        cos: Device float32 [max positions, R // 2]; R (even, <= D) is how many of a head's channels turn.
        sin: Like `cos`.
        interleaved: True pairs channels (2i, 2i + 1); False pairs (i, i + R // 2).
    """

    cos: Array
    sin: Array
    interleaved: bool


@dataclass(frozen=True, slots=True)
class Rows:
    """Where the rows of a step stand: device arrays that are allocated once, filled before each step.

    Rows of one sequence are consecutive and in ascending position. Ops take the first `count` rows.

    Attributes:
        count: Rows of this step.
        positions: int32 [max rows], absolute position of each row.
        slots: int32 [max rows], where the row's key and value go: block id * block_size + offset in the block.
        sequences: int32 [max rows], the row of `block_tables` that the row belongs to.
        block_tables: int32 [max sequences, max blocks a sequence]; entries past a sequence's length are never read.
    """

    count: int
    positions: Array
    slots: Array
    sequences: Array
    block_tables: Array


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of a stage: what its ops may be asked for at once.

    Attributes:
        rows: Rows.
        query_heads, kv_heads, head_dim: Of attention; 0 on a stage without layers.
        max_positions: What a row of the block tables holds.
        experts_per_token: That each row chooses; 0 without experts.
        sampled_rows: Rows that sample; 0 on a stage without the head.
        vocab: Columns of their logits.
        distinct_ids: The most token ids that one row's penalties look at.
        logprobs: The most that a row lists.
    """

    rows: int
    query_heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    max_positions: int = 0
    experts_per_token: int = 0
    sampled_rows: int = 0
    vocab: int = 0
    distinct_ids: int = 0
    logprobs: int = 0


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


class Pending(Protocol[T_co]):
    """A result that is on its way from a device to the host.

    Its memory is its own: as many may be pending as one likes, waited for in any order, or dropped.
    """

    @property
    def ready(self) -> bool:
        """Whether `wait` would not wait for a device."""
        ...

    def wait(self) -> T_co:
        """The result; once. From any thread, while another uses the backend, and without the interpreter's lock."""
        ...


class Arrived(Generic[T]):
    """A `Pending` that nobody has to wait for."""

    __slots__ = ("_value",)

    def __init__(self, value: T) -> None:
        self._value = value

    @property
    def ready(self) -> bool:
        """True."""
        return True

    def wait(self) -> T:
        """The value."""
        return self._value


class Backend(ABC):
    """One device's arithmetic. An instance belongs to one stage and is used by one thread at a time, whichever it is: a
    backend whose device is a matter of the thread makes it the caller's itself."""

    name: ClassVar[str]

    @property
    def numeric_class(self) -> str:
        """Backends of one class give the same bits, on whichever device each runs."""
        return self.name

    def entered(self) -> AbstractContextManager[None]:
        """For a run of calls of one thread: what each of them would otherwise do by itself to be on its device."""
        return nullcontext()

    # -- memory ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A new, unwritten array."""

    @abstractmethod
    def activations(self, rows: int, channels: int) -> Array:
        """A new array of rows that matrix products read: the `out` of rms_norm, gated_linear and paged_attention.

        Only ops, `write` and `read` may touch it: a backend may keep it in the form that its products want.
        """

    @abstractmethod
    def upload(self, host: NDArray[Any]) -> Array:
        """A new array with the host array's contents."""

    @abstractmethod
    def write(self, target: Array, host: NDArray[Any]) -> None:
        """Enqueue a copy of `host` into the leading part of `target` (same dtype; leading dimension may be shorter).

        `host` may be changed by the caller as soon as this returns: hidden states are written right out of the buffer
        that they were received in.
        """

    @abstractmethod
    def read_later(self, source: Array) -> Pending[NDArray[Any]]:
        """Enqueue a copy of `source` to the host: as it is once everything before has run. Later ops may change it.

        The copy is the caller's for as long as it, or a view of it, is held: hidden states are sent right out of it,
        while later steps run.
        """

    def read(self, source: Array) -> NDArray[Any]:
        """Wait, then return a host copy of `source`; see `read_later`."""
        return self.read_later(source).wait()

    @abstractmethod
    def load_matrix(self, parts: Sequence[GroupedMatrix]) -> Weight:
        """Bring matrices of equal K to the device, stacked along N (so that q, k and v are one product).

        Each may have an `input_order` of its own.
        """

    @abstractmethod
    def load_gated(self, gate: GroupedMatrix, up: GroupedMatrix) -> Weight:
        """Bring a gate and an up matrix of equal shape to the device, for `gated_linear`."""

    @abstractmethod
    def load_experts(
        self,
        experts: Iterable[Expert],
        *,
        activation: Activation = "silu",
        gate_bias: Array | None = None,
        up_bias: Array | None = None,
        down_bias: Array | None = None,
    ) -> Weight:
        """Bring a layer's experts to the device, for `expert_mlp`; they are of equal shapes, and only one is in flight.

        If they have a length, a backend may make room for so many and no more before the first has come.
        Device biases: gate_bias and up_bias [experts, F], down_bias [experts, K], all or none.
        """

    @abstractmethod
    def allocate_kv(self, layout: KVLayout) -> KVCache:
        """A pool of that shape, zero-filled."""

    @abstractmethod
    def reserve(self, step: StepShape) -> None:
        """Allocate what ops take besides their arguments, for any step up to that shape: after all weights are loaded
        and the pool is allocated, before the first step. What comes later allocates nothing on the device, so a step
        cannot fail for want of memory."""

    @abstractmethod
    def resident_bytes(self) -> int:
        """Bytes of weights and KV pools that this backend holds on its device."""

    @abstractmethod
    def close(self) -> None:
        """Give back threads and device memory. Idempotent."""

    # -- running -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def replay(self, key: Hashable, issue: Callable[[], None]) -> None:
        """Enqueue what `issue()` enqueues.

        A backend may record it under `key` and replay the record when the key comes again; so for one key `issue` must
        always enqueue the same ops on the same arrays. What changes from step to step lies in arrays filled by `write`,
        outside `issue`.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything enqueued."""

    # -- ops ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def begin_step(self, rows: Rows, cache: KVCache, query_heads: int) -> None:
        """Enqueue what the attention ops of all layers share, once a step before them; `rows` and `cache` as theirs."""

    @abstractmethod
    def embedding(
        self,
        token_ids: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        scale: float = 1.0,
        last_tokens: Array | None = None,
    ) -> None:
        """out[r, :] = scale * weight[token_ids[r], :] for r < rows; both rounded to float32.

        token_ids int32 [>= rows], weight [vocab, K] from `load_matrix`, out [>= rows, K]; last_tokens int32 [places].
        With it, an id below 0 stands for last_tokens[-1 - id], which `sample_later` wrote. An id outside of the matrix,
        or of last_tokens, gives a row of NaN.
        """

    @abstractmethod
    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        """out[r] = x[r] / sqrt(mean(x[r]^2) + eps) * weight. x, out [>= rows, K]; weight [K]."""

    @abstractmethod
    def add_rms_norm(self, x: Array, weight: Array, eps: float, out: Array, rows: int) -> None:
        """out[r] += what `rms_norm` makes of x[r] (a norm after a sublayer). Both are float32 and no activations."""

    @abstractmethod
    def linear(
        self, x: Array, weight: Weight, out: Array, rows: int, *, bias: Array | None = None, accumulate: bool = False
    ) -> None:
        """out[r] = x[r] @ weight.T (+ bias), or with `accumulate` out[r] + that, which is float32 before it is added.

        x [>= rows, K]; weight [N, K]; out [>= rows, N]; bias [N].
        """

    @abstractmethod
    def gated_linear(
        self,
        x: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        activation: Activation = "silu",
        bias: Array | None = None,
    ) -> None:
        """out[r] = silu(x[r] @ gate.T) * (x[r] @ up.T), or another activation.

        x [>= rows, K]; weight from `load_gated`; out [>= rows, N]; bias [2 N]: of the gate, then of the up.
        """

    def norm_linear(
        self,
        x: Array,
        norm: Array,
        eps: float,
        normed: Array,
        weight: Weight,
        out: Array,
        rows: int,
        *,
        bias: Array | None = None,
    ) -> None:
        """`rms_norm` of x into `normed`, then `linear` of that; a backend may do both at once, with the same bits.

        `normed` is scratch: what it holds afterwards is undefined.
        """
        self.rms_norm(x, norm, eps, normed, rows)
        self.linear(normed, weight, out, rows, bias=bias)

    def norm_mlp(
        self,
        x: Array,
        norm: Array,
        eps: float,
        normed: Array,
        gate_up: Weight,
        gated: Array,
        down: Weight,
        out: Array,
        rows: int,
        *,
        activation: Activation = "silu",
        gate_up_bias: Array | None = None,
        down_bias: Array | None = None,
        accumulate: bool = False,
    ) -> None:
        """`rms_norm` of x into `normed`, `gated_linear` of that into `gated`, `linear` of that; a backend may do them
        in fewer steps, with the same bits. `out` may be x.

        `normed` and `gated` are scratch: what they hold afterwards is undefined.
        """
        self.rms_norm(x, norm, eps, normed, rows)
        self.gated_linear(normed, gate_up, gated, rows, activation=activation, bias=gate_up_bias)
        self.linear(gated, down, out, rows, bias=down_bias, accumulate=accumulate)

    @abstractmethod
    def route(
        self,
        x: Array,
        router: Array,
        rule: RouterRule,
        expert_ids: Array,
        shares: Array,
        rows: int,
        *,
        bias: Array | None = None,
        choice_bias: Array | None = None,
    ) -> None:
        """Choose each row's experts by the logits x[r] @ router.T (+ bias), in float32; see `RouterRule`.

        x [>= rows, K]; router [experts, K]; bias, choice_bias [experts]; expert_ids int32 and shares
        [>= rows, experts_per_token], the best first.
        """

    @abstractmethod
    def expert_mlp(self, x: Array, experts: Weight, expert_ids: Array, shares: Array, out: Array, rows: int) -> None:
        """out[r] += sum over j, ascending, of shares[r, j] * (down_e @ activation(gate_e @ x[r], up_e @ x[r])), with
        e = expert_ids[r, j] and the biases where there are. The sum is a chain of float32 fma from zero, and is added
        to out[r] once.

        x [>= rows, K]; experts from `load_experts`; expert_ids int32 and shares [>= rows, chosen]; out [>= rows, K].
        """

    @abstractmethod
    def add_gated(self, x: Array, gate: Array, y: Array, out: Array, rows: int) -> None:
        """out[r] += sigmoid(x[r] . gate) * y[r] (a shared expert's gate).

        x [>= rows, K]; gate [K]; y, out [>= rows, N], float32 and no activations.
        """

    @abstractmethod
    def rope_kv_write(
        self,
        qkv: Array,
        rows: Rows,
        rope: RopeTable | None,
        cache: KVCache,
        layer: int,
        *,
        q_norm: Array | None = None,
        k_norm: Array | None = None,
        eps: float = 0.0,
    ) -> None:
        """Turn the queries and keys of qkv in place and write keys and values to the cache at `rows.slots`.

        qkv [>= rows.count, (Hq + 2 Hkv) * D]: the query heads, the key heads, the value heads. With `q_norm` and
        `k_norm` [D] each query and key head is first RMS-normalised over D (Qwen3); with q_norm [Hq * D] and k_norm
        [Hkv * D] all queries, and all keys, of a row are normalised as one vector (OLMoE). Without a rope nothing
        turns.
        """

    @abstractmethod
    def paged_attention(
        self,
        qkv: Array,
        rows: Rows,
        cache: KVCache,
        layer: int,
        scale: float,
        out: Array,
        *,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Array | None = None,
    ) -> None:
        """Causal attention of each row's query heads over positions 0..its own of its sequence.

        qkv as `rope_kv_write` left it; out [>= rows.count, Hq * D]; query head h reads KV head h // (Hq // Hkv). A row
        of position p needs the keys and values of positions 0..p written, those of this step's rows included.

        Args:
            window: From 1: only the last `window` positions, the row's own included, are attended to.
            softcap: Above 0: a score s becomes softcap * tanh(s / softcap).
            sinks: [Hq], a logit a head that takes part in the softmax's sum and has no value (gpt-oss).
        """

    @abstractmethod
    def soft_cap(self, x: Array, cap: float, rows: int) -> None:
        """x[r] = cap * tanh(x[r] / cap), in place, a float32 array and no activations."""

    @abstractmethod
    def gather_rows(self, x: Array, indices: Array, out: Array, count: int) -> None:
        """out[i] = x[indices[i]] for i < count. x, out [.., K]; indices int32."""

    @abstractmethod
    def sample_later(
        self,
        logits: Array,
        batch: SamplingBatch,
        last_tokens: Array | None = None,
        places: NDArray[np.int32] | None = None,
    ) -> Pending[SampleOutput]:
        """Enqueue the choice of one token a row. logits [>= batch.rows, vocab], left unchanged. See `SamplingBatch`.

        Row r's token also goes to last_tokens[places[r]], an array of the device: for the embedding of a step that is
        enqueued before this one's tokens are known to the host. `batch` and `places` may be changed by the caller as
        soon as this returns.

        Args:
            last_tokens: int32 [places]; None: tokens go to the host alone.
            places: int32 [batch.rows], all different, on the host; given with last_tokens and only with it.
        """

    def sample(self, logits: Array, batch: SamplingBatch) -> SampleOutput:
        """Wait, then choose one token a row; see `sample_later`."""
        return self.sample_later(logits, batch).wait()
