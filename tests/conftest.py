"""What the whole suite shares: one tiny model and one Ray session, each started by the first test that asks."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random 2-layer model."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def ray_session() -> Iterator[Any]:
    """A Ray of the suite's own on this machine."""
    from cluster.session import end_session, start_session
    from core.config import ClusterConfig
    from core.machine import read_machine

    session = start_session(ClusterConfig(), read_machine())
    yield session
    end_session()
