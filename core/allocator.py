"""How the C library keeps freed memory: for processes that free and take large tensors all the time.

glibc gives a freed block above 32 MB back to the kernel at once, and the next one of that size is zeroed anew, page by
page: a learner's or a quantiser's update spends a fifth of its time and more on that. Source: mallopt(3).
"""

import ctypes

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX = -1, -2, -4  # malloc.h
_TOP_PAD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """From now on this process keeps what it frees and takes from there; its peak stays what it was. glibc only."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:  # another C library: as before
        return
    for name, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _TOP_PAD_BYTES)):
        mallopt(name, value)
