import pytest

from grouping.embeddings import Encoder


@pytest.fixture(scope="session")
def minilm() -> Encoder:
    return Encoder("minilm")
