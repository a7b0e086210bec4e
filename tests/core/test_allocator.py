"""Freed memory stays in the process: counted in page faults, in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.fast

# Bytes of 64 MB, zeroed by the program, freed, and taken again: twenty times.
PROGRAM = """
import resource
{call}
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
bytearray(b"x") * (64 << 20)
before = faults()
for _ in range(20):
    bytearray(b"x") * (64 << 20)
print(faults() - before)
"""


def page_faults(call: str) -> int:
    program = PROGRAM.format(call=call)
    ended = subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    return int(ended.stdout)


def test_a_large_block_is_not_faulted_in_again():
    as_the_library_has_it = page_faults("")
    kept = page_faults("from core.allocator import keep_freed_memory; keep_freed_memory()")
    assert as_the_library_has_it > 1000
    assert kept < as_the_library_has_it / 50
