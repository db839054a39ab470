"""The device memory of a backend: its limit, its end, and the threads that use it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shardline.kernels import DeviceMemoryError, KVLayout

pytestmark = pytest.mark.gpu
MIB = 2**20
Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """Backends that end with the test."""
    pytest.importorskip("cupy")
    from shardline.kernels.cuda.backend import CudaBackend

    made = []

    def backend(limit: int | None = None, device: int = 0) -> Any:
        made.append(CudaBackend(device, None, limit))
        return made[-1]

    yield backend
    for one in made:
        one.close()


def layout(blocks: int) -> KVLayout:
    """1 MiB a block."""
    return KVLayout(num_layers=4, num_blocks=blocks, block_size=256, num_kv_heads=4, head_dim=64, dtype="float16")


def context_bytes() -> int:
    from shardline.kernels.cuda.memory import CONTEXT_BYTES

    return CONTEXT_BYTES


def test_a_limit_is_kept_and_the_error_has_the_numbers(make: Make) -> None:
    backend = make(context_bytes() + 64 * MIB)
    held = [backend.empty((MIB,), "float32") for _ in range(12)]  # 4 MiB each
    with pytest.raises(DeviceMemoryError, match=r"while its stage was being loaded.*Raise the limit") as caught:
        backend.allocate_kv(layout(32))
    error = caught.value
    assert error.wanted >= 16 * MIB  # keys, or the values after them
    assert 48 * MIB <= error.held <= 64 * MIB
    assert error.limit == context_bytes() + 64 * MIB
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    # What was refused is not counted: there is room for what fits.
    held.append(backend.empty((MIB,), "float32"))
    assert len(held) == 13


def test_what_is_only_kept_for_later_does_not_count(make: Make) -> None:
    backend = make(context_bytes() + 64 * MIB)
    for size in (7, 8, 9, 10, 11, 12):  # none fits into what is left of one before
        backend.empty((size * MIB,), "float32")
    assert backend.read(backend.upload(np.arange(4, dtype=np.int32))).tolist() == [0, 1, 2, 3]


def test_a_limit_that_leaves_nothing_is_refused(make: Make) -> None:
    with pytest.raises(DeviceMemoryError, match="leaves nothing"):
        make(context_bytes())


def test_a_full_device_is_the_same_error(make: Make) -> None:
    with pytest.raises(DeviceMemoryError, match="of the GPU's") as caught:
        make().empty((1 << 45,), "uint8")
    assert caught.value.limit is None


def test_two_backends_have_a_limit_each(make: Make) -> None:
    one, other = make(context_bytes() + 32 * MIB), make(context_bytes() + 32 * MIB)
    held = [backend.empty((5 * MIB,), "float32") for backend in (one, other)]
    with pytest.raises(DeviceMemoryError):
        one.empty((3 * MIB,), "float32")
    assert len(held) == 2


def test_closing_gives_back_what_is_still_held(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Told by the calls to the driver: its free memory is all processes', and others may use the card meanwhile."""
    import cupy

    runtime = cupy.cuda.runtime
    malloc, free = runtime.malloc, runtime.free
    taken: dict[int, int] = {}

    def take(size: int) -> int:
        address = int(malloc(size))
        taken[address] = size
        return address

    def give(address: int) -> None:
        del taken[address]  # not what somebody else has, and nothing twice
        free(address)

    monkeypatch.setattr(runtime, "malloc", take)
    monkeypatch.setattr(runtime, "free", give)
    pooled = cupy.get_default_memory_pool().total_bytes()
    backend = make()
    held = [backend.allocate_kv(layout(64)), backend.activations(512, 4096), backend.empty((64 * MIB,), "uint8")]
    assert sum(taken.values()) == backend._memory.held_bytes >= 128 * MIB
    assert cupy.get_default_memory_pool().total_bytes() == pooled, "arrays that the backend does not know of"
    backend.close()
    assert not taken
    assert backend.resident_bytes() == 0
    backend.close()
    # Arrays that die later free nothing twice, and nothing of another backend.
    other = make()
    array = other.upload(np.arange(1000, dtype=np.float32))
    del held
    assert np.array_equal(other.read(array), np.arange(1000, dtype=np.float32))


def test_a_closed_backend_refuses_work(make: Make) -> None:
    backend = make()
    backend.close()
    with pytest.raises(AssertionError, match="closed"):
        backend.empty((1,), "float32")


def test_every_operation_enters_its_device() -> None:
    pytest.importorskip("cupy")
    from shardline.kernels.cuda.backend import CudaBackend
    from shardline.kernels.cuda.entry import operations

    assert {"expert_mlp", "empty", "replay"} <= set(operations())
    for name in operations():
        assert hasattr(vars(CudaBackend)[name], "__wrapped__"), name


def test_any_thread_may_call_and_keeps_its_own_device(make: Make) -> None:
    import cupy

    runtime = cupy.cuda.runtime
    if runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    backend = make(device=1)
    values = np.arange(4096, dtype=np.float32)
    seen: list[Any] = []

    def work() -> None:
        # A new thread's device is 0.
        seen.append(runtime.getDevice())
        array = backend.upload(values)
        seen.append(array.data.device_id if hasattr(array.data, "device_id") else 1)
        seen.append(np.array_equal(backend.read(array), values))
        seen.append(runtime.getDevice())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [0, 1, True, 0]
    with pytest.raises(AssertionError, match="while GPU 0 is current"):
        # Past the wrapper, and so on the wrong device: refused.
        backend._memory.allocate(512)


def test_one_thread_drives_several_gpus(make: Make) -> None:
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    backends = [make(device=0), make(device=1)]
    arrays = [backend.empty((1024,), "int32") for backend in backends]
    for step in range(3):
        for backend, array in zip(backends, arrays, strict=True):
            backend.write(array, np.full(1024, step, np.int32))
        for backend, array in zip(backends, arrays, strict=True):
            assert (backend.read(array) == step).all()


def test_a_run_of_calls_enters_once_and_leaves_the_thread_as_it_was(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make(), make()
    entries = []
    for backend in (one, other):

        def here(backend: Any = backend, original: Any = backend.here) -> Any:
            entries.append(backend)
            return original()

        monkeypatch.setattr(backend, "here", here)
    array = one.empty((4,), "int32")
    entries.clear()
    with one.entered():
        one.write(array, np.arange(4, dtype=np.int32))
        # Another one in between, as where stages take turns in one thread.
        other.upload(np.zeros(4, np.int32))
        assert one.read(array).tolist() == [0, 1, 2, 3]
    assert entries == [one, other]
    with pytest.raises(ZeroDivisionError), one.entered():
        1 / 0  # noqa: B018
    entries.clear()
    one.synchronize()
    assert entries == [one]
