"""The suite's one serving; the engine tests of this folder share it."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def serving(ray_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray Serve's own imports
        from tests.serve.serving import Serving

    running = Serving(tmp_path_factory.mktemp("serving"))
    yield running
    running.close()
