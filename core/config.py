"""The configuration: one frozen tree, every field with a unit and a bound, checked whole before Ray starts.

`load_config(path, overrides)` reads YAML, applies `section.key=value` words from the command line, and raises
UserError with one sentence (nearest known name for a typo). Each folder of the project has its own section.
"""

from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from core.config_text import Loader, apply_override, has_inner, sentence
from core.errors import UserError
from core.section import Section

DType = Literal["auto", "float32", "bfloat16"]
MIN_STORE_BYTES = 75 << 20  # Ray refuses less


class ArithmeticConfig(Section):
    """The generated task: sums and differences of two numbers, in several phrasings."""

    num_prompts: int = Field(512, ge=1, description="training rows")
    num_heldout: int = Field(64, ge=1, description="held-out rows, disjoint from the training rows")
    max_operand: int = Field(20, ge=1, le=10**9, description="operands are drawn from 0..max_operand")
    operations: tuple[Literal["+", "-"], ...] = Field(("+", "-"), min_length=1)
    phrasings: Literal["several", "plain"] = "several"  # plain: "What is a + b? Reply with the number only."


class DataConfig(Section):
    source: Literal["arithmetic", "jsonl"] = "arithmetic"
    arithmetic: ArithmeticConfig = ArithmeticConfig()
    path: Path | None = Field(None, description="JSONL file of training rows, when source is jsonl")
    heldout_path: Path | None = Field(None, description="JSONL file of held-out rows")
    heldout_fraction: float = Field(0.1, gt=0, lt=1, description="share of `path` held out when heldout_path is unset")
    bad_rows: Literal["error", "skip"] = "error"  # skip: counted and reported
    system_prompt: str | None = None  # None: what the chat template does by itself
    max_prompt_tokens: int = Field(128, ge=1, description="tokens, counted after the chat template")
    long_prompts: Literal["error", "drop", "cut_left", "cut_right"] = "error"

    @field_validator("path", "heldout_path")
    @classmethod
    def _from_here(cls, path: Path | None) -> Path | None:
        """A run's own config.yaml must name the same files from any folder."""
        return path.absolute() if path else None


class PolicyConfig(Section):
    model: str = "smollm2-135m"  # this name: the bundled model; else a folder in Hugging Face format

    @field_validator("model")
    @classmethod
    def _from_here(cls, model: str) -> str:
        """A run's own config.yaml must name the same folder from any folder."""
        return str(Path(model).absolute()) if Path(model).is_dir() else model


class RolloutConfig(Section):
    num_workers: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    dtype: DType = "auto"
    samples_per_prompt: int = Field(8, ge=1, description="answers a group")
    max_new_tokens: int = Field(24, ge=1, description="tokens an answer")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    stop: tuple[str, ...] = ()
    max_num_sequences: int = Field(128, ge=1, description="answers in the engine at once")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 24)
    gpu_memory_fraction: float = Field(0.85, gt=0, le=1, description="of a GPU, when device is cuda")
    tensor_parallel_size: int = Field(1, ge=1)
    cpus: float = Field(1, ge=0, description="CPUs a worker asks Ray for")
    threads: int = Field(0, ge=0, description="OpenMP threads a worker; 0: the allowed cores")

    @field_validator("stop")
    @classmethod
    def _stop_says_something(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if "" in stop:
            raise ValueError("each stop text must have at least one character")
        return stop


class RewardTerm(Section):
    kind: Literal["exact", "last_number", "regex", "python"]
    weight: float = Field(1.0, description="factor in the sum")
    pattern: str | None = Field(None, description="regex: its first group is compared with the answer")
    path: Path | None = Field(None, description="python: the file")
    function: str = Field("score", description="python: the function in the file")

    @field_validator("path")
    @classmethod
    def _from_here(cls, path: Path | None) -> Path | None:
        """Workers run in folders of their own, so the path is made whole where the config is read."""
        return path.absolute() if path else None


class RewardConfig(Section):
    terms: tuple[RewardTerm, ...] = Field((RewardTerm(kind="last_number"),), min_length=1)
    num_workers: int = Field(1, ge=1)
    time_limit_s: float = Field(10.0, gt=0, description="seconds a sample")
    import_limit_s: float = Field(60.0, gt=0, description="seconds for the import of a user's file")
    max_retries: int = Field(2, ge=0, description="of a user's function that raised or whose process ended, a group")
    retry_backoff_s: float = Field(0.5, ge=0, description="before the second try; doubles, to at most 30 s")
    cpus: float = Field(0, ge=0)


class GroupingConfig(Section):
    baseline: Literal["prompt", "global", "semantic"] = "semantic"
    prompt_form: Literal["grpo", "dr_grpo", "rloo"] = "grpo"  # for baseline prompt
    std_epsilon: float = Field(1e-4, ge=0, description="added to the group's standard deviation, for form grpo")
    num_clusters: int = Field(8, ge=1)
    recompute_every: int = Field(750, ge=1, description="steps between refits; 500 to 1000 is usual")
    max_points_per_centroid: int = Field(256, ge=1)
    ema: float = Field(0.05, ge=0, le=1, description="share of a batch's mean in a centroid between refits")
    history_discount: float = Field(0.98, gt=0, le=1, description="a step, of past rewards")
    max_shrinkage: float = Field(0.8, ge=0, le=1, description="largest weight of the cluster's mean")
    zero_variance: Literal["keep", "drop", "cap"] = "keep"
    zero_variance_cap: float = Field(0.25, ge=0, description="largest |advantage| of a zero-variance group, for cap")
    encoder: str = "minilm"  # this name: all-MiniLM-L6-v2 from its wheel; else a folder of a BERT-style encoder
    device: Literal["cpu", "cuda"] = "cpu"
    cpus: float = Field(0, ge=0)


class LearnerConfig(Section):
    num_ranks: int = Field(1, ge=1)
    device: Literal["cpu", "cuda"] = "cpu"
    zero_stage: int = Field(0, ge=0, le=3)
    dtype: DType = "auto"
    loss: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    clip_low: float = Field(0.2, ge=0, lt=1)
    clip_high: float = Field(0.2, ge=0)
    importance_cap: float = Field(2.0, gt=0, description="truncation of exp(policy - behavior log-prob)")
    kl_coefficient: float = Field(0.0, ge=0, description="of k1 in the reward; 0.01 to 0.05 is usual")
    learning_rate: float = Field(5e-6, gt=0, le=1)
    warmup_steps: int = Field(0, ge=0)
    schedule: Literal["constant", "linear"] = "constant"
    weight_decay: float = Field(0.0, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    adam_epsilon: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, gt=0)
    num_minibatches: int = Field(1, ge=1, description="optimizer steps a loop step")
    max_tokens_per_micro_batch: int = Field(4096, ge=1, description="packed tokens through the network at once")
    logprob_chunk: int = Field(512, ge=1, description="rows of logits held at once")
    mask_truncated: bool = False  # leave answers cut off by length out of the loss
    checkpoint_every_layers: int = Field(0, ge=0, description="activation checkpointing; 0: off")
    offload: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: Path | None = None
    cpus: float = Field(1, ge=0, description="CPUs a rank asks Ray for")
    threads: int = Field(0, ge=0, description="torch threads a rank; 0: allowed cores / ranks")


class EvaluationConfig(Section):
    every: int = Field(50, ge=1, description="steps between held-out evaluations")
    num_prompts: int = Field(64, ge=1, description="held-out rows asked, greedily")
    num_samples_shown: int = Field(8, ge=0, description="answers kept for the report, before and after")


class CheckpointConfig(Section):
    every: int = Field(50, ge=1, description="steps between checkpoints")
    keep: int = Field(2, ge=1, description="newest checkpoints kept")


class WatchConfig(Section):
    """The checks of core/watch during the run; `python -m cluster.doctor RUN_DIR` runs them on its folder."""

    every: int = Field(5, ge=0, description="steps between two looks; 0: none")


class LoggingConfig(Section):
    """Who gets the metrics besides metrics.jsonl and Prometheus; each logger needs its package."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    project: str = Field("grpo", min_length=1, description="wandb's project, mlflow's experiment")


class DeadlineConfig(Section):
    """Seconds after which a wait ends the run with the name of who was waited for."""

    start_s: float = Field(300, gt=0, description="an actor's start")
    rollout_s: float = Field(600, gt=0, description="a group")
    reward_s: float = Field(120, gt=0, description="the rewards of a group")
    grouping_s: float = Field(120, gt=0, description="labels or advantages of a step")
    learner_s: float = Field(1800, gt=0, description="an update")
    weights_s: float = Field(300, gt=0, description="a weight load")
    checkpoint_s: float = Field(600, gt=0, description="a save or a load")


class ClusterConfig(Section):
    address: str | None = None  # None: a Ray of our own on this machine; "auto" or host:port joins a running one
    dashboard_host: str = "127.0.0.1"
    object_store_bytes: int = Field(0, ge=0, description="0: sized to the machine")
    restart_limit: int = Field(3, ge=0, description="replacements of one worker, in a row, before the run ends")
    restart_backoff_s: float = Field(1.0, ge=0, description="before the second replacement; doubles")


class Config(Section):
    run_dir: Path = Path("runs/default")
    seed: int = Field(0, ge=0, lt=2**31)
    num_steps: int | None = Field(None, ge=1, description="length of the run in steps; or give num_epochs")
    num_epochs: int | None = Field(None, ge=1, description="length of the run in passes over the data")
    prompts_per_step: int = Field(16, ge=1)
    max_staleness: int = Field(0, ge=0, description="weight updates a trained token may lag behind; 0: synchronous")
    data: DataConfig = DataConfig()
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    grouping: GroupingConfig = GroupingConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    watch: WatchConfig = WatchConfig()
    logging: LoggingConfig = LoggingConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    cluster: ClusterConfig = ClusterConfig()

    @model_validator(mode="after")
    def _sections_fit_together(self) -> Self:
        if (self.num_steps is None) == (self.num_epochs is None):
            got = "neither" if self.num_steps is None else f"{self.num_steps} and {self.num_epochs}; set one to null"
            raise ValueError(f"exactly one of num_steps and num_epochs must be set, got {got}")
        if self.data.source != "jsonl" and (self.data.path or self.data.heldout_path):
            raise ValueError(f"data.source must be jsonl where data.path is set, got {self.data.source}")
        if self.data.source == "jsonl" and self.data.path is None:
            raise ValueError("data.path must name a JSONL file when data.source is jsonl")
        if self.grouping.baseline == "prompt" and self.rollout.samples_per_prompt < 2:
            raise ValueError(
                "rollout.samples_per_prompt must be at least 2 with grouping.baseline=prompt (one answer has no "
                f"peers), got {self.rollout.samples_per_prompt}; raise it or choose grouping.baseline=semantic"
            )
        if self.learner.num_minibatches > self.prompts_per_step:
            raise ValueError(
                f"learner.num_minibatches must be at most prompts_per_step ({self.prompts_per_step}), "
                f"got {self.learner.num_minibatches}"
            )
        if self.learner.num_ranks > self.prompts_per_step:
            raise ValueError(
                f"learner.num_ranks must be at most prompts_per_step ({self.prompts_per_step}), "
                f"got {self.learner.num_ranks}"
            )
        if self.learner.offload == "nvme" and self.learner.nvme_path is None:
            raise ValueError("learner.nvme_path must be set when learner.offload is nvme")
        for position, term in enumerate(self.reward.terms):
            if term.kind == "regex" and term.pattern is None:
                raise ValueError(f"reward.terms[{position}].pattern must be set for kind regex")
            if term.kind == "python" and term.path is None:
                raise ValueError(f"reward.terms[{position}].path must be set for kind python")
        return self

    @model_validator(mode="after")
    def _nothing_fails_late(self) -> Self:
        """Refuses here what a worker's library would refuse minutes later, or what would be ignored."""
        if self.learner.offload != "none" and self.learner.zero_stage == 0:
            raise ValueError(f"learner.zero_stage must be 1 to 3 with learner.offload={self.learner.offload}, got 0")
        if self.rollout.device == "cpu" and self.rollout.tensor_parallel_size > 1:
            raise ValueError(
                f"rollout.tensor_parallel_size must be 1 with rollout.device=cpu, got "
                f"{self.rollout.tensor_parallel_size}; raise rollout.num_workers instead"
            )
        if 0 < self.cluster.object_store_bytes < MIN_STORE_BYTES:
            raise ValueError(
                f"cluster.object_store_bytes must be 0 or at least {MIN_STORE_BYTES}, "
                f"got {self.cluster.object_store_bytes}"
            )
        for name, section in (
            ("rollout", self.rollout),
            ("reward", self.reward),
            ("grouping", self.grouping),
            ("learner", self.learner),
        ):
            if section.cpus > 1 and section.cpus % 1:
                raise ValueError(f"{name}.cpus must be whole above 1 (Ray's rule), got {section.cpus:g}")
        for position, term in enumerate(self.reward.terms):
            if (term.pattern is not None and term.kind != "regex") or (term.path is not None and term.kind != "python"):
                raise ValueError(
                    f"reward.terms[{position}] must have pattern only for kind regex and path only for kind python, "
                    f"got kind {term.kind}"
                )
        return self

    @property
    def kl_needs_reference(self) -> bool:
        """Whether a reference model has to exist beside the policy."""
        return self.learner.kl_coefficient > 0

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest prompt and answer together."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens


Root = TypeVar("Root", bound=Section)


def load_config(path: Path | str, overrides: list[str] | None = None, kind: type[Root] = Config) -> Root:  # type: ignore[assignment]
    """The checked config of a YAML file with `section.key=value` overrides laid over it; UserError on any mistake."""
    source = Path(path)
    try:
        with source.open(encoding="utf-8") as stream:
            tree = yaml.load(stream, Loader) or {}
    except FileNotFoundError:
        raise UserError(f"config must be an existing file, got {source}") from None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: encodings, giant numbers
        raise UserError(f"config {source} could not be read as YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise UserError(f"config {source} must hold keys and values, got {type(tree).__name__}")
    for word in overrides or []:
        apply_override(tree, word, kind)
    return parse_config(tree, str(source), kind)


def parse_config(tree: dict[str, Any], where: str, kind: type[Root] = Config) -> Root:  # type: ignore[assignment]
    """The checked config of a nested dict; UserError names the field, the value and the cure."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        items = error.errors()
        blamed = [item["loc"] for item in items]
        own = [item for item in items if item["type"] != "too_short" or not has_inner(item["loc"], blamed)]
        raise UserError("; ".join(sentence(item, kind) for item in own) + f" ({where})") from None


def dump_config(config: Config) -> str:
    """YAML text from which parse_config gives the same Config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
