"""Puts the emulated `cupy` where the CUDA backend looks for the real one."""

import os

import cupy_fake

cupy_fake.install()


def pytest_collection_modifyitems(items):
    if os.environ.get("EMU_SMALL"):
        for item in items:
            if hasattr(item.module, "COUNTS"):
                item.module.COUNTS = [1, 2, 7, 9, 33]
