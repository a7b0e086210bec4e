"""The serving configuration: what it refuses, and in which words."""

from pathlib import Path

import pytest

from core.config import load_config, parse_config
from core.errors import UserError
from serve.config import ServeConfig

pytestmark = pytest.mark.fast
CHECKOUT = Path(__file__).resolve().parents[2]


def test_the_shipped_configuration_loads_and_overrides_reach_it():
    config = load_config(CHECKOUT / "configs" / "serve.yaml", ["gateway.port=8123", "cache.enabled=false"], ServeConfig)
    assert (config.gateway.port, config.cache.enabled, config.gateway.host) == (8123, False, "127.0.0.1")
    assert config.serve_dir.is_absolute()  # replicas run in folders of their own


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"gateway": {"host": "0.0.0.0"}}, "gateway.host must be a loopback address"),
        ({"gateway": {"prot": 1}}, "did you mean"),
        ({"replica": {"min_replicas": 3, "max_replicas": 2}}, "replica.min_replicas must be at most"),
        ({"canary": {"shares": [0.5, 0.1]}}, "canary.shares must rise"),
        ({"canary": {"shares": [0.5, 1.0]}}, "canary.shares must rise"),
        ({"quantize": {"group_sizes": [64, 1]}}, "quantize.group_sizes must be among"),
        ({"cache": {"timeout_s": 0}}, "cache.timeout_s"),
        ({"cache": {"max_memory_bytes": 1 << 20}}, "cache.max_memory_bytes"),
        ({"gate": {"max_relative_loss": float("nan")}}, "gate.max_relative_loss"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tree, words):
    with pytest.raises(UserError, match=words.replace(".", r"\.")):
        parse_config(tree, "here", ServeConfig)


def test_another_address_is_taken_once_there_are_keys():
    tree = {"gateway": {"host": "0.0.0.0", "api_keys": "keys.txt"}}
    assert parse_config(tree, "here", ServeConfig).gateway.host == "0.0.0.0"
