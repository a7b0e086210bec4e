"""The serving configuration: one frozen tree, as for training; `load_config(path, words, ServeConfig)` reads it."""

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from core.config import ClusterConfig, DType
from core.section import Section

GROUP_SIZES = (32, 64, 128)  # that vLLM's kernels serve
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class GatewayConfig(Section):
    """The public HTTP surface."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535)
    model_name: str = Field("policy", min_length=1, description="the name clients ask for")
    num_replicas: int = Field(1, ge=1)
    api_keys: Path | None = Field(None, description="file of `tenant sha256-of-key` lines; None: loopback only")
    requests_per_minute: float = Field(0, ge=0, description="a tenant's steady rate; 0: no limit")
    burst: int = Field(20, ge=1, description="requests a tenant may send at once above the steady rate")
    max_body_bytes: int = Field(1 << 20, ge=1 << 10)
    max_choices: int = Field(16, ge=1, description="largest n of a request")
    request_timeout_s: float = Field(600, gt=0, description="the whole answer")
    routing_lease_s: float = Field(1.0, gt=0, description="age at which a gateway must ask again which version serves")


class ReplicaConfig(Section):
    """The vLLM engines behind the gateway."""

    device: Literal["cpu", "cuda"] = "cpu"
    dtype: DType = "auto"
    max_model_len: int = Field(2048, ge=16, description="tokens of prompt and answer together")
    max_num_sequences: int = Field(32, ge=1, description="answers in an engine at once")
    kv_cache_bytes: int = Field(1 << 29, ge=1 << 24)
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1, description="of a GPU, when device is cuda")
    tensor_parallel_size: int = Field(1, ge=1)
    cpus: float = Field(0.5, ge=0, description="CPUs a replica asks Ray for")
    threads: int = Field(0, ge=0, description="OpenMP threads a replica; 0: the allowed cores")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    target_ongoing_requests: float = Field(24, gt=0, description="requests a replica is scaled for")
    max_ongoing_requests: int = Field(64, ge=1)
    max_queued_requests: int = Field(128, ge=1, description="beyond: 429 with Retry-After")
    drain_s: float = Field(60, gt=0, description="longest wait for running answers when a replica is taken away")


class CacheConfig(Section):
    """The response cache."""

    enabled: bool = True
    redis_url: str | None = None  # None: an embedded Valkey of our own; redis://, rediss://, unix://, redis+sentinel://
    max_memory_bytes: int = Field(64 << 20, ge=4 << 20, description="of the embedded server; least recently used go")
    ttl_s: float = Field(86400, gt=0)
    ttl_jitter: float = Field(0.1, ge=0, lt=1, description="share of ttl_s an entry may live longer or shorter")
    timeout_s: float = Field(0.05, gt=0, le=1, description="longest wait for one command")
    breaker_failures: int = Field(3, ge=1, description="failures in a row that open the breaker")
    breaker_cooldown_s: float = Field(2.0, gt=0, description="between probes of an open breaker")
    max_value_bytes: int = Field(1 << 20, ge=1 << 10)
    lease_s: float = Field(30, gt=0, description="a computation's claim on its key")
    lease_wait_s: float = Field(10, gt=0, description="longest wait for another process's computation")
    shared_between_tenants: bool = False
    namespace: str = Field("grpo", min_length=1, max_length=64)


class QuantizeConfig(Section):
    """AWQ, 4-bit weights and 16-bit activations."""

    enabled: bool = True
    group_sizes: tuple[int, ...] = Field((64, 32), min_length=1, description="tried in order until the gate passes")
    num_calibration_prompts: int = Field(128, ge=16, description="drawn from the training prompts")
    max_calibration_tokens: int = Field(256, ge=16, description="tokens a calibration prompt")
    time_limit_s: float = Field(1800, gt=0)


class GateConfig(Section):
    """What a version must show before it may serve."""

    max_relative_loss: float = Field(0.01, gt=0, lt=1, description="bound on (full - candidate) / full reward")
    confidence: float = Field(0.95, gt=0.5, lt=1, description="of the one-sided bound")
    max_loss_to_stable: float = Field(0.05, gt=0, lt=1, description="the same of a new version against the stable one")
    confidence_to_stable: float = Field(0.6, gt=0.5, lt=1, description="low: the canary is the strict judge of that")
    num_tasks: int = Field(1024, ge=16, description="held-out tasks both models answer")
    max_perplexity_ratio: float = Field(1.3, gt=1, description="candidate / full, on fixed text")
    time_limit_s: float = Field(1800, gt=0)


class CanaryConfig(Section):
    """How a new version takes over traffic."""

    shares: tuple[float, ...] = Field((0.01, 0.05, 0.25, 0.5), min_length=1)
    min_requests: int = Field(50, ge=1, description="canary answers before a step is judged")
    max_step_s: float = Field(600, gt=0, description="a step without min_requests ends the canary, named so")
    max_error_rate_increase: float = Field(0.01, ge=0, lt=1)
    max_latency_ratio: float = Field(1.5, gt=1, description="p95 time to first token, canary / stable")
    max_reward_loss: float = Field(0.05, gt=0, lt=1, description="relative loss on the probe set that rolls back")
    error_probability: float = Field(0.05, gt=0, lt=0.5, description="of the sequential test, over the whole canary")


class ServeConfig(Section):
    serve_dir: Path = Path("runs/serving")
    seed: int = Field(0, ge=0, lt=2**31)
    gateway: GatewayConfig = GatewayConfig()
    replica: ReplicaConfig = ReplicaConfig()
    cache: CacheConfig = CacheConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    gate: GateConfig = GateConfig()
    canary: CanaryConfig = CanaryConfig()
    cluster: ClusterConfig = ClusterConfig()

    @field_validator("serve_dir")
    @classmethod
    def _from_here(cls, path: Path) -> Path:
        """Replicas run in folders of their own."""
        return path.absolute()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if self.gateway.api_keys is None and self.gateway.host not in LOOPBACK:
            raise ValueError(
                f"gateway.host must be a loopback address where gateway.api_keys is not set, got {self.gateway.host}; "
                "name a file of keys first"
            )
        if self.replica.min_replicas > self.replica.max_replicas:
            raise ValueError(
                f"replica.min_replicas must be at most replica.max_replicas ({self.replica.max_replicas}), "
                f"got {self.replica.min_replicas}"
            )
        if list(self.canary.shares) != sorted(set(self.canary.shares)) or not 0 < self.canary.shares[-1] < 1:
            raise ValueError(f"canary.shares must rise between 0 and 1, got {self.canary.shares}")
        if not set(self.quantize.group_sizes) <= set(GROUP_SIZES):
            raise ValueError(f"quantize.group_sizes must be among {GROUP_SIZES}, got {self.quantize.group_sizes}")
        return self
