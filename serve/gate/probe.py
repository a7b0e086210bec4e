"""What a version does on the engine that will serve it: answers to tasks, perplexity, golden prompts, speed.

The engine runs in a process of its own (`python -m serve.gate.probe JOB.json LIFELINE`), so that its memory is returned
before the next version's starts.
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from core.errors import RunBroken, UserError
from core.machine import read_machine
from data.template import template_tokens
from policy.bundled import load_tokenizer
from policy.engine import set_engine_environment
from reward.user_process import die_with_parent
from serve.artefacts.artefact import Artefact
from serve.child import Job, Say, run_job, say_plainly
from serve.config import ReplicaConfig, ServeConfig
from serve.gate.tasks import Tasks
from serve.replica import engine_arguments

GOLDEN_PROMPTS = ("What is 2 + 3?", "Say hello.", "Name a colour.", "What is the capital of France?")
GOLDEN_TOKENS = 16
MIN_REPEATED = 8  # one token this often, and nothing else, is no answer
FIXED_TEXT = Path(__file__).with_name("fixed_text.txt")
NUM_AT_ONCE = 128  # answers in the engine together
SPEED_PROMPTS, SPEED_TOKENS = 32, 32
_CPU_KERNEL = "cpu_gemm_wna16"


@dataclass(frozen=True)
class Answers:
    """What one version did."""

    texts: list[str]  # to the tasks, greedily
    perplexity: float | None  # of the fixed text; None: not a finite number
    golden_flaws: list[str]  # a sentence for each golden prompt that was not answered as a working model would
    tokens_per_s: float  # 32 answers of 32 tokens at once
    start_s: float  # until the engine was up


def ask(artefact: Artefact, tasks: Tasks, config: ServeConfig, say: Say = say_plainly) -> Answers:
    """The Answers of an artefact. RunBroken, with the engine's last words, where it cannot be served or is too slow."""
    with tempfile.TemporaryDirectory(prefix="grpo-probe-") as place:
        job: dict[str, Any] = {
            "model": str(artefact.folder),
            "replica": config.replica.model_dump(mode="json"),
            "prompts": [list(prompt.tokens) for prompt in tasks.prompts],
            "max_new_tokens": tasks.max_new_tokens,
            "stop": list(tasks.stop),
            "output": f"{place}/answers.json",
        }
        file = Path(place, "job.json")
        file.write_text(json.dumps(job), encoding="utf-8")
        run_job(
            Job(
                what=f"asking version {artefact.digest[:12]} ({artefact.origin.quantization}) its tasks",
                arguments=["-m", "serve.gate.probe", str(file)],
                time_limit_s=config.gate.time_limit_s,
                limit_name="gate.time_limit_s",
            ),
            Path(place, "log.txt"),
            say,
        )
        return Answers(**json.loads(Path(job["output"]).read_text(encoding="utf-8")))


def golden_flaw(prompt: str, text: str, tokens: Sequence[int], logprobs: Sequence[float]) -> str | None:
    """What is wrong with the answer to a golden prompt, in words; None for one that a working model could give."""
    broken = [logprob for logprob in logprobs if not math.isfinite(logprob)]
    if broken:
        return f"the answer to {prompt!r} must have finite log-probs, got {broken[0]}"
    if not text.strip():
        return f"the answer to {prompt!r} must not be empty, got {text!r}"
    if len(tokens) >= MIN_REPEATED and len(set(tokens)) == 1:
        return f"the answer to {prompt!r} must not be one token over and over, got {text[:60]!r}"
    return None


def missing_kernel() -> str | None:
    """A sentence where this machine's vLLM for CPUs cannot serve 4-bit weights; None where it can. Imports vLLM."""
    import torch
    import vllm._custom_ops  # noqa: F401 -- loads the kernels

    if hasattr(torch.ops._C, _CPU_KERNEL):
        return None
    return (
        f"serving 4-bit weights on a CPU needs vLLM's kernel {_CPU_KERNEL}, which this machine's build lacks (it comes "
        "with AVX-512); set quantize.enabled=false or serve on another machine"
    )


def main(job: dict[str, Any]) -> None:
    replica = ReplicaConfig(**job["replica"])
    set_engine_environment(replica.device, replica.threads or read_machine().num_cores)
    model = Path(job["model"])
    tree = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in tree and replica.device == "cpu" and (missing := missing_kernel()):
        raise UserError(missing)
    from vllm import LLM

    started = time.monotonic()
    longest = max(map(len, job["prompts"]), default=0) + job["max_new_tokens"]
    limit = min(replica.max_model_len, tree.get("max_position_embeddings", replica.max_model_len))
    if longest > limit:
        raise UserError(
            f"a task must take at most {limit} tokens with its answer, got {longest}; raise replica.max_model_len"
        )
    llm = LLM(**engine_arguments(replica, model) | {"max_model_len": limit, "max_num_seqs": NUM_AT_ONCE})
    start_s = time.monotonic() - started
    print("progress 1 4", flush=True)
    answers = Answers(
        texts=_answers(llm, job),
        perplexity=_perplexity(llm, model),
        golden_flaws=_golden_flaws(llm, model),
        tokens_per_s=_speed(llm, model),
        start_s=start_s,
    )
    Path(job["output"]).write_text(json.dumps(asdict(answers)), encoding="utf-8")


def _generate(llm: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, **sampling)
    return llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)


def _answers(llm: Any, job: dict[str, Any]) -> list[str]:
    if not job["prompts"]:
        return []
    outputs = _generate(llm, job["prompts"], max_tokens=job["max_new_tokens"], stop=job["stop"] or None)
    print("progress 2 4", flush=True)
    return [output.outputs[0].text for output in outputs]


def _perplexity(llm: Any, model: Path) -> float | None:
    """exp of the mean negative log-prob of each token of the fixed text but the first of each line."""
    tokenizer = load_tokenizer(model)
    lines = FIXED_TEXT.read_text(encoding="utf-8").splitlines()
    rows = [list(tokenizer(line)["input_ids"]) for line in lines]
    logprobs = []
    for ids, output in zip(rows, _generate(llm, rows, max_tokens=1, prompt_logprobs=0), strict=True):
        logprobs += [entry[token].logprob for token, entry in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
    print("progress 3 4", flush=True)
    mean = sum(logprobs) / len(logprobs)
    return math.exp(-mean) if math.isfinite(mean) and mean > -700 else None  # e^700 is about the largest float


def _golden_tokens(model: Path) -> list[list[int]]:
    tokenizer = load_tokenizer(model)
    return [template_tokens(tokenizer, [{"role": "user", "content": text}]) for text in GOLDEN_PROMPTS]


def _golden_flaws(llm: Any, model: Path) -> list[str]:
    prompts = _golden_tokens(model)
    found = []
    for prompt, output in zip(
        GOLDEN_PROMPTS, _generate(llm, prompts, max_tokens=GOLDEN_TOKENS, logprobs=0), strict=True
    ):
        answer = output.outputs[0]
        tokens = list(answer.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(tokens, answer.logprobs, strict=True)]
        found.append(golden_flaw(prompt, answer.text, tokens, logprobs))
    return [flaw for flaw in found if flaw]


def _speed(llm: Any, model: Path) -> float:
    asked = _golden_tokens(model) * (SPEED_PROMPTS // len(GOLDEN_PROMPTS))
    started = time.monotonic()
    outputs = _generate(llm, asked, max_tokens=SPEED_TOKENS, ignore_eos=True)
    return sum(len(output.outputs[0].token_ids) for output in outputs) / (time.monotonic() - started)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[2]))
    try:
        main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    except (UserError, RunBroken) as error:
        sys.exit(f"error: {error}")
