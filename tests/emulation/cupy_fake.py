"""A `cupy` that lives in host memory, with guard pages behind each array; kernels run by the emulator."""

import contextlib
import ctypes
import hashlib
import os
import re
import subprocess
import sys
import threading
import types
import weakref
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
PAGE = 4096


class _Ptr:
    def __init__(self, ptr):
        self.ptr = ptr

    def copy_from_device_async(self, other, n, stream):
        ctypes.memmove(self.ptr, other.ptr, n)


class _Region:
    """Bytes whose end is at a page that cannot be touched."""

    def __init__(self, nbytes):
        rounded = -(-max(nbytes, 1) // 16) * 16
        self.size = -(-rounded // PAGE) * PAGE + PAGE
        self.base = libc.mmap(None, self.size, 3, 0x22, -1, 0)
        assert self.base not in (None, 2**64 - 1), "out of memory"
        libc.mprotect(self.base + self.size - PAGE, PAGE, 0)
        self.start = self.base + self.size - PAGE - rounded
        self.nbytes = nbytes
        # uninitialised memory is a NaN that nothing computes
        ctypes.memset(self.start, 0x7F, rounded)

    def __del__(self, libc=libc):
        libc.munmap(self.base, self.size)


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        super().__init__(f"CUDA error {status}")
        self.status = status


DEVICES = 2
TOTAL_BYTES = 80 << 30
CURRENT = threading.local()
"""Of a thread: device, stream and allocator, as CUDA and CuPy have them."""


class Runtime:
    """Memory as the driver gives it, and the current device."""

    CUDARuntimeError = CUDARuntimeError
    memcpyHostToDevice, memcpyDeviceToHost = 1, 2  # noqa: N815

    def __init__(self):
        self.held = {}

    def getDevice(self):  # noqa: N802
        return getattr(CURRENT, "device", 0)

    def setDevice(self, index):  # noqa: N802
        CURRENT.device = index

    def getDeviceCount(self):  # noqa: N802
        return DEVICES

    def memGetInfo(self):  # noqa: N802
        return TOTAL_BYTES - sum(region.nbytes for region in self.held.values()), TOTAL_BYTES

    def malloc(self, size):
        if size > self.memGetInfo()[0]:
            raise CUDARuntimeError(2)
        region = _Region(size)
        self.held[region.start] = region
        return region.start

    def free(self, pointer):
        # The driver waits for what is under way. What still points there from here on faults.
        for stream in STREAMS.values():
            stream.land(to_host=True)
        del self.held[pointer]

    def memcpyAsync(self, to, source, size, kind, stream):  # noqa: N802
        """As late as the device may do it: before the next kernel, and what goes to the host lands when it is waited
        for, with what was there at its place in the stream."""
        STREAMS[stream].enqueue(kind, to, source, size)

    def eventQuery(self, event):  # noqa: N802
        return EVENTS[event].status()


runtime = Runtime()
STREAMS = {}


class UnownedMemory:
    def __init__(self, ptr, size, owner, device_id):
        self.ptr, self.owner = ptr, owner


class MemoryPointer(_Ptr):
    def __init__(self, mem, offset):
        super().__init__(mem.ptr + offset)
        self.mem = mem


class GuardedArena:
    """In the place of the backend's: nothing is kept, so that every array has its own guard page."""

    def __init__(self, take, give):
        self._take, self._give = take, give
        self._used = {}

    @property
    def held_bytes(self):
        return sum(self._used.values())

    def allocate(self, size):
        start = self._take(size)
        if start is not None:
            self._used[start] = size
        return start

    def release(self, start):
        del self._used[start]
        self._give(start)

    def trim(self):
        pass

    def close(self):
        for start in list(self._used):
            self.release(start)


class PinnedMemory:
    def __init__(self, size, flags=0):
        self._region = _Region(size)
        self.ptr, self.size = self._region.start, size


@contextlib.contextmanager
def using_allocator(allocator):
    before = getattr(CURRENT, "allocator", None)
    CURRENT.allocator = allocator
    try:
        yield
    finally:
        CURRENT.allocator = before


class ndarray(np.ndarray):  # noqa: N801
    @property
    def data(self):
        return _Ptr(self.ctypes.data)

    def get(self, stream=None, blocking=True):
        if stream is not None:
            stream.land(to_host=True)
        return np.array(np.asarray(self).view(np.ndarray))

    def set(self, host, stream=None):
        np.asarray(self).view(np.ndarray)[...] = host

    def __array_finalize__(self, obj):
        self._region = getattr(obj, "_region", None)


UNOWNED = [0]
"""Bytes that CuPy's own pool was asked for."""


def empty(shape, dtype=np.float32):
    shape = (shape,) if np.isscalar(shape) else tuple(shape)
    dtype = np.dtype(dtype)
    n = int(np.prod(shape)) * dtype.itemsize
    allocator = getattr(CURRENT, "allocator", None)
    if allocator is not None:
        assert isinstance(CURRENT.stream, Stream), "CuPy would order this array's memory by another stream"
        region = allocator(max(n, 1))
        start = region.ptr
    else:
        region = _Region(n)
        start = region.start
        UNOWNED[0] += n
    buf = (ctypes.c_char * max(n, 1)).from_address(start)
    a = np.ndarray.__new__(ndarray, shape, dtype, buffer=buf)
    a._region = region
    return a


def zeros(shape, dtype=np.float32):
    a = empty(shape, dtype)
    np.asarray(a).view(np.ndarray)[...] = 0
    return a


def ones(shape, dtype=np.float32):
    a = empty(shape, dtype)
    np.asarray(a).view(np.ndarray)[...] = 1
    return a


def full(shape, v, dtype=np.float32):
    a = empty(shape, dtype)
    np.asarray(a).view(np.ndarray)[...] = v
    return a


def asarray(host, dtype=None):
    if isinstance(host, ndarray):
        return host
    host = np.asarray(host, dtype)
    a = empty(host.shape, host.dtype)
    np.asarray(a).view(np.ndarray)[...] = host
    return a


def concatenate(parts, axis=0):
    return asarray(np.concatenate([np.asarray(p).view(np.ndarray) for p in parts], axis))


def tile(a, n):
    return asarray(np.tile(np.asarray(a).view(np.ndarray), n))


array = asarray


class Stream:
    def __init__(self, non_blocking=False):
        self.ptr = len(STREAMS) + 1
        STREAMS[self.ptr] = self
        self.recording = None
        self.enqueued = 0  # copies so far
        self.copies = []  # those that the device has not begun: (number, kind, to, source, size)
        self.landing = []  # those whose bytes are on the way to the host: (number, to, bytes)
        self.lock = threading.RLock()
        self.device = runtime.getDevice()
        self.synchronised = 0

    def __enter__(self):
        assert runtime.getDevice() == self.device, "a stream of another device"
        self._before = [*getattr(self, "_before", []), getattr(CURRENT, "stream", None)]
        CURRENT.stream = self
        return self

    def __exit__(self, *a):
        CURRENT.stream = self._before.pop()
        return False

    def enqueue(self, kind, to, source, size):
        with self.lock:
            self.enqueued += 1
            self.copies.append((self.enqueued, kind, to, source, size))

    def land(self, to_host, until=None):
        """Do the copies that wait, up to number `until`, in their order; with `to_host` they arrive there too."""
        with self.lock:
            until = self.enqueued if until is None else until
            while self.copies and self.copies[0][0] <= until:
                number, kind, to, source, size = self.copies.pop(0)
                if kind == runtime.memcpyHostToDevice:
                    ctypes.memmove(to, source, size)
                else:
                    self.landing.append((number, to, ctypes.string_at(source, size)))
            while to_host and self.landing and self.landing[0][0] <= until:
                _, to, content = self.landing.pop(0)
                ctypes.memmove(to, content, len(content))

    @property
    def done(self):
        return not self.copies and not self.landing

    def synchronize(self):
        self.synchronised += 1
        self.land(to_host=True)

    def begin_capture(self):
        self.recording = []

    def end_capture(self):
        g = Graph(self.recording)
        self.recording = None
        return g


EVENTS = weakref.WeakValueDictionary()


class Event:
    def __init__(self, block=False, disable_timing=False):
        self.ptr = id(self)
        EVENTS[self.ptr] = self
        self.stream = None

    def record(self, stream):
        self.stream, self.after = stream, stream.enqueued

    def status(self):
        """cudaErrorNotReady while a copy before it has not landed."""
        self.check_device()
        waiting = self.stream is not None and (*self.stream.copies, *self.stream.landing)
        return 600 if waiting and min(copy[0] for copy in waiting) <= self.after else 0

    def synchronize(self):
        self.check_device()
        if self.stream is not None:
            self.stream.land(to_host=True, until=self.after)

    def check_device(self):
        assert self.stream is None or runtime.getDevice() == self.stream.device, (
            "CUDA would begin to use another device"
        )


class Graph:
    def __init__(self, launches):
        self.launches = launches

    def launch(self, stream):
        stream.land(to_host=False)
        for launch in self.launches:
            launch()


class Device:
    def __init__(self, i):
        self.id = i
        self.compute_capability = os.environ.get("EMU_ARCH", "86")
        self.attributes = {"MultiProcessorCount": int(os.environ.get("EMU_SMS", "28"))}
        self._before = []

    def __enter__(self):
        self._before.append(runtime.getDevice())
        runtime.setDevice(self.id)
        return self

    def __exit__(self, *a):
        runtime.setDevice(self._before.pop())

    def use(self):
        runtime.setDevice(self.id)


me = sys.modules[__name__]
cuda = types.ModuleType("cupy.cuda")
cuda.Device = Device
cuda.Stream = Stream
cuda.Event = Event
cuda.runtime = runtime
cuda.MemoryPointer = MemoryPointer
cuda.UnownedMemory = UnownedMemory
cuda.PinnedMemory = PinnedMemory
cuda.using_allocator = using_allocator
cuda.get_current_stream = lambda: None
cupy = types.ModuleType("cupy")
for n in ("ndarray", "empty", "zeros", "ones", "full", "asarray", "array", "concatenate", "tile"):
    setattr(cupy, n, globals()[n])
for n in ("float32", "float16", "int32", "uint32", "uint16", "uint8", "uint64", "int64"):
    setattr(cupy, n, getattr(np, n))
cupy.get_default_memory_pool = lambda: types.SimpleNamespace(total_bytes=lambda: UNOWNED[0])
cupy.get_default_pinned_memory_pool = lambda: types.SimpleNamespace(free_all_blocks=lambda: None)
cupy.cuda = cuda
sys.modules["cupy"] = cupy
sys.modules["cupy.cuda"] = cuda
b = types.ModuleType("cupy_backends")
bc = types.ModuleType("cupy_backends.cuda")
ba = types.ModuleType("cupy_backends.cuda.api")
drv = types.ModuleType("cupy_backends.cuda.api.driver")
bl = types.ModuleType("cupy_backends.cuda.libs")
nv = types.ModuleType("cupy_backends.cuda.libs.nvrtc")
nv.getVersion = lambda: (0, 0)
nv.createProgram = lambda *a: 0
nv.compileProgram = lambda *a: None
nv.getProgramLog = lambda *a: ""
nv.getCUBIN = lambda *a: b""
nv.destroyProgram = lambda *a: None


class NVRTCError(Exception):
    pass


nv.NVRTCError = NVRTCError
b.cuda = bc
bc.api = ba
ba.driver = drv
bc.libs = bl
bl.nvrtc = nv
for m in (b, bc, ba, drv, bl, nv):
    sys.modules[m.__name__] = m

CACHE = Path(os.environ.get("EMU_CACHE", str(Path.home() / ".cache" / "shardline" / "emulated")))
CACHE.mkdir(parents=True, exist_ok=True)
FLAGS = [
    "-O2",
    "-std=c++17",
    "-ffp-contract=off",
    "-mavx2",
    "-mf16c",
    "-mfma",
    "-fPIC",
    "-shared",
    "-fno-strict-aliasing",
    "-w",
    "-fsanitize=alignment,bounds",
    "-fno-sanitize-recover",
    "-fpermissive",
    "-fno-gnu-unique",
    "-Wl,-Bsymbolic",
    "-fvisibility=hidden",
]
LIBS = {}
SEED = [int(os.environ.get("EMU_SEED", "1"))]


def build(text, warpgroups, arch):
    text = (
        f"#define EMU_WARPGROUPS {int(warpgroups)}\n#define __CUDA_ARCH__ {arch}0\n"
        + (("#define PORTABLE 1\n") if "#define PORTABLE 1" in text else "")
        + f'#include "{HERE}/emu.hpp"\n'
        + text
    )
    text = re.sub(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];", r"\1* \2 = (\1*)dyn_shared;", text)
    text = text.replace("__shared__", "static")
    key = hashlib.sha256((text + (HERE / "emu.hpp").read_text() + repr(FLAGS)).encode()).hexdigest()[:24]
    so = CACHE / f"{key}.so"
    if not so.exists():
        src = CACHE / f"{key}.cpp"
        marked = text.replace("__global__", "__KERNEL__")
        marked = re.sub(r"__launch_bounds__\(((?:[^()]|\([^()]*\))*)\)", "", marked)
        src.write_text(marked)
        pre = subprocess.run(
            ["g++", "-E", "-P", "-std=c++17", "-D__KERNEL__=KERNELMARK", "-x", "c++", str(src)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        names = re.findall(r"KERNELMARK void\s+(\w+)\s*\(", pre)
        src.write_text(
            marked
            + "\n"
            + "\n".join(
                f'extern "C" __attribute__((visibility("default"))) void emu_call_{n}(void** a) {{ invoke({n}, a); }}'
                for n in names
            )
            + '\nextern "C" __attribute__((visibility("default"))) const char* emu_names() { return "'
            + " ".join(names)
            + '"; }\n'
        )
        p = subprocess.run(
            ["g++", *FLAGS, "-D__KERNEL__=", "-x", "c++", str(src), "-o", str(so) + ".tmp"],
            capture_output=True,
            text=True,
        )
        if p.returncode:
            raise RuntimeError(p.stderr[:6000])
        os.replace(str(so) + ".tmp", so)
    if key not in LIBS:
        lib = ctypes.CDLL(str(so))
        lib.emu_names.restype = ctypes.c_char_p
        LIBS[key] = lib
    return LIBS[key]


class Function:
    def __init__(self, lib, name):
        self.lib, self.name = lib, name
        self.call = getattr(lib, "emu_call_" + name)
        self.limit = 48 * 1024


LAUNCHES = {}
LOG = []


def install():
    """Puts the emulator below shardline's backend."""
    from shardline.kernels.cuda import compile as comp
    from shardline.kernels.cuda import memory, modules, tensor_maps

    def source(file, defines):
        t = comp.source_text(file, defines)
        common = (comp.HERE / "common.cuh").read_text()
        assert common in t
        t = t.replace(common, "")
        return t.replace('asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));', "y = emu_exp2(x);")

    class Modules:
        def __init__(self, arch, cache=None):
            self.arch = arch
            self.f = {}

        def start(self, *a, **k):
            pass

        def close(self):
            pass

        def function(self, file, kernel, shared, defines):
            key = (file, kernel, tuple(sorted(defines.items())))
            if key not in self.f:
                lib = build(source(file, defines), self.arch == 90, self.arch)
                self.f[key] = Function(lib, kernel)
            f = self.f[key]
            f.limit = max(f.limit, shared)
            return f

    class Launcher:
        def __init__(self, arch):
            pass

        def __call__(self, function, grid, threads, arguments, shared, stream, cluster=1):
            assert cluster == 1, "clusters of blocks are not emulated: take another EMU_ARCH than 90 and newer"
            slots = []
            for a in arguments:
                if isinstance(a, ndarray):
                    slots.append(ctypes.c_uint64(a.ctypes.data))
                elif isinstance(a, np.uint64):
                    slots.append(ctypes.c_uint64(int(a)))
                elif isinstance(a, np.int32):
                    slots.append(ctypes.c_int32(int(a)))
                elif isinstance(a, np.float32):
                    slots.append(ctypes.c_float(float(a)))
                else:
                    raise TypeError(f"argument {type(a)}")
            keep = list(arguments)
            grid = (*map(int, grid), 1, 1)[:3]
            assert all(g >= 1 for g in grid), grid
            assert max(grid[1:]) <= 65535, grid

            def run(slots=slots, keep=keep):
                ptrs = (ctypes.c_void_p * len(slots))(*[ctypes.addressof(s) for s in slots])
                SEED[0] += 1 if SEED[0] else 0
                function.lib.emu_launch(
                    function.name.encode(),
                    function.call,
                    *grid,
                    int(threads),
                    int(shared),
                    ptrs,
                    ctypes.c_uint64(SEED[0]),
                    SEED[0] & 1,
                )
                LAUNCHES[function.name] = LAUNCHES.get(function.name, 0) + 1

            assert runtime.getDevice() == stream.device, "a launch while another device is current"
            if stream.recording is not None:
                stream.recording.append(run)
            else:
                stream.land(to_host=False)
                run()

    if not os.environ.get("EMU_POOL"):
        memory.Arena = GuardedArena
    modules.Modules = Modules
    modules.Launcher = Launcher
    # There is no driver to describe a tensor, and no emulated kernel reads a description (wide.cu needs clusters).
    tensor_maps._encoder = lambda: lambda *_: 0
