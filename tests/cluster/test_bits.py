"""The bit contract on the real model: whatever runs beside a sequence, and however the model is split, its tokens and
the bytes of its logprobs are those that it has alone.

Here every two values of two factors meet; `shardline verify` can run every combination.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.cluster.checking.verify import Verifier
from shardline.cluster.checking.verify_cases import Case, Factors, default_splits
from shardline.kernels import Backend
from shardline.kernels.backend import Arrived
from shardline.stage import StageSpec, backend_for

LAYERS = 30
CASES = Factors(default_splits(LAYERS)).covering()


@pytest.fixture(scope="module")
def verifier(smollm2: Path) -> Iterator[Verifier]:
    with Verifier(smollm2) as opened:
        yield opened


def test_the_cases_cover_the_matrix() -> None:
    assert {case.split for case in CASES} == set(default_splits(LAYERS))
    assert sorted(len(split) for split in default_splits(LAYERS)) == [1, 2, 2, 3, 3]
    assert all(sum(split) == LAYERS for split in default_splits(LAYERS))
    assert {(case.block_size, case.batch) for case in CASES} == {
        (size, batch) for size in (8, 16, 64) for batch in (1, 2, 5, 17, 33, 64)
    }
    assert {(case.prefill_chunk, case.warm, case.seeded) for case in CASES} >= {
        (chunk, True, seeded) for chunk in (7, 64) for seeded in (False, True)
    }
    assert {(case.preempted, case.batch) for case in CASES} == {
        (preempted, batch) for preempted in (False, True) for batch in (1, 2, 5, 17, 33, 64)
    }


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_batch_has_the_bytes_of_its_sequences_alone(verifier: Verifier, case: Case) -> None:
    result = verifier.run(case)
    assert result.first is None, f"{result.differing} of {result.sequences} sequences differ: {result.first}"
    assert not result.missed
    assert result.tokens == 6 * case.batch


# Every split, block size and chunk, warm and cold, preempted and not.
EIGHT_BITS = [
    Case((30,), 8, 7, 5, warm=True, preempted=True, seeded=True),
    Case((1, 29), 64, None, 17, warm=False, preempted=True, seeded=False),
    Case((10, 10, 10), 16, 64, 5, warm=True, preempted=False, seeded=True),
]


@pytest.mark.parametrize("case", EIGHT_BITS, ids=str)
def test_with_keys_and_values_in_eight_bits_too(smollm2: Path, case: Case) -> None:
    with Verifier(smollm2, kv_dtype="int8", max_batch=17) as verifier:
        result = verifier.run(case)
    assert result.first is None, f"{result.differing} of {result.sequences} sequences differ: {result.first}"
    assert not result.missed
    assert result.tokens == 6 * case.batch


# -- faults that must be seen ----------------------------------------------------------------------------------------

PLAIN = Case(split=(LAYERS,), block_size=16, prefill_chunk=None, batch=5, warm=False, preempted=False, seeded=False)


def bump(values: Any) -> None:
    """The smallest change that a float32 array can have."""
    values[...] = np.nextafter(values, np.float32(np.inf), dtype=np.float32)


def row_dependent_product(backend: Any, spec: StageSpec) -> None:
    """A tile chosen by the number of rows: with more than one, one channel's last bit is another."""
    linear = backend.linear

    def faulty(x: Any, weight: Any, out: Any, rows: int, **options: Any) -> None:
        linear(x, weight, out, rows, **options)
        if rows > 1:
            backend.synchronize()
            bump(out[:rows, 0])

    backend.linear = faulty


def rounded_border(backend: Any, spec: StageSpec) -> None:
    """A residual stream that is rounded on its way to the next stage."""
    read_later = backend.read_later

    def faulty(source: Any) -> Any:
        values = read_later(source).wait()
        return Arrived(values.astype(np.float16).astype(np.float32) if not spec.has_head else values)

    backend.read_later = faulty


def noise_by_row(backend: Any, spec: StageSpec) -> None:
    """Noise keyed by a row's place in the batch."""
    sample_later = backend.sample_later

    def faulty(logits: Any, batch: Any, *arguments: Any) -> Any:
        batch.seed[...] += np.arange(batch.rows, dtype=np.uint64)
        return sample_later(logits, batch, *arguments)

    backend.sample_later = faulty


def misplaced_token(backend: Any, spec: StageSpec) -> None:
    """Where the next step finds the tokens that were chosen, two sequences have each other's."""
    sample_later = backend.sample_later

    def faulty(logits: Any, batch: Any, last_tokens: Any, places: Any) -> Any:
        return sample_later(logits, batch, last_tokens, np.roll(places, 1))

    backend.sample_later = faulty


def stale_block(backend: Any, spec: StageSpec) -> None:
    """A position that is written one place too early when it is the last of its block and runs alone."""
    write = backend.rope_kv_write

    def faulty(qkv: Any, rows: Any, *arguments: Any, **options: Any) -> None:
        if rows.count == 1 and rows.slots[0] % spec.block_size == spec.block_size - 1:
            rows.slots[0] -= 1
        write(qkv, rows, *arguments, **options)

    backend.rope_kv_write = faulty


def scale_of_a_chunk(backend: Any, spec: StageSpec) -> None:
    """Values of 8 bits whose scale is the largest of the step's rows."""
    write = backend.rope_kv_write

    def faulty(qkv: Any, rows: Any, rope: Any, cache: Any, layer: int, **options: Any) -> None:
        write(qkv, rows, rope, cache, layer, **options)
        backend.synchronize()
        block, offset = np.divmod(rows.slots[: rows.count], spec.block_size)
        scales, values = cache.value_scales[layer].view(np.float16), cache.values[layer]
        own = scales[block, :, offset].astype(np.float32)
        shared = own.max(axis=0)
        values[block, :, offset] = np.rint(values[block, :, offset] * (own / shared)[..., None])
        scales[block, :, offset] = shared

    backend.rope_kv_write = faulty


FAULTS: list[tuple[Callable[[Any, StageSpec], None], dict[str, Any]]] = [
    (row_dependent_product, {}),
    (row_dependent_product, {"batch": 17, "seeded": True}),
    (rounded_border, {"split": (1, 29)}),
    (noise_by_row, {"seeded": True}),
    (misplaced_token, {"warm": True}),
    (stale_block, {"block_size": 8, "prefill_chunk": 7}),
    (scale_of_a_chunk, {"prefill_chunk": 7}),
]


@pytest.mark.parametrize(("fault", "changed"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_seeded_fault_is_seen(
    smollm2: Path, fault: Callable[[Any, StageSpec], None], changed: dict[str, Any]
) -> None:
    def factory(spec: StageSpec) -> Backend:
        backend = backend_for(spec)
        # A recorded program would not come back to the changed op.
        backend.replay = lambda _key, issue: issue()  # type: ignore[method-assign]
        fault(backend, spec)
        return backend

    kv_dtype = "int8" if fault is scale_of_a_chunk else "float16"
    with Verifier(smollm2, max_batch=17, kv_dtype=kv_dtype, backend_factory=factory) as faulty:
        result = faulty.run(replace(PLAIN, **changed))
    assert not result.passed
    assert result.first is not None
