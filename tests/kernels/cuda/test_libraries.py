"""Which of a process's mapped files are vendor libraries."""

from __future__ import annotations

from shardline.kernels.cuda.libraries import vendor_libraries

MAPS = """\
7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libcublasLt.so.13.0.0.19
7f01-7f02 r--p 00000000 08:01 11 /usr/lib/x86_64-linux-gnu/libcublasLt.so.13.0.0.19
7f02-7f03 r-xp 00000000 08:01 12 /opt/with blank/libcudnn_ops.so.9
7f03-7f04 r-xp 00000000 08:01 13 /lib/libnccl.so.2 (deleted)
7f04-7f05 r-xp 00000000 08:01 14 /lib/libcuda.so.1
7f05-7f06 r-xp 00000000 08:01 15 /lib/libnvrtc.so.12
7f06-7f07 r-xp 00000000 08:01 16 /lib/cublas.cpython-311-x86_64-linux-gnu.so
7f07-7f08 r-xp 00000000 08:01 17 /lib/libscipy_openblas64_-32a4b2a6.so
7f08-7f09 rw-p 00000000 00:00 0
7f09-7f0a rw-p 00000000 00:00 0 [heap]
"""


def test_vendor_libraries_are_found_and_nothing_else() -> None:
    assert vendor_libraries(MAPS) == {
        "/usr/lib/x86_64-linux-gnu/libcublasLt.so.13.0.0.19",
        "/opt/with blank/libcudnn_ops.so.9",
        "/lib/libnccl.so.2 (deleted)",
    }


def test_this_process_has_none() -> None:
    assert vendor_libraries() == set()
