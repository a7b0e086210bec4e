"""The HTTP surface against its own OpenAPI document: whatever comes in, no server error goes out."""

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(500)]
MIN_CASES = 200


def test_fuzzing_the_routes_finds_no_server_error(serving, tmp_path):
    command = [
        str(Path(sys.executable).with_name("schemathesis")),
        "run",
        f"{serving.url}/openapi.json",
        "--checks=not_a_server_error",
        "--phases=examples,coverage,fuzzing",
        "--max-examples=60",
        "--seed=1",
        "--request-timeout=60",
        "--generation-database=none",
        "--continue-on-failure",
        "--no-color",
        "--no-shrink",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) generated", done.stdout)
    assert found, done.stdout[-3000:]
    assert int(found[1]) >= MIN_CASES
    assert httpx.get(f"{serving.url}/health", timeout=30).status_code == 200
