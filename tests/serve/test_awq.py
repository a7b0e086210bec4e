"""One real quantisation of a tiny model, and what the engine makes of it."""

import dataclasses
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from core.errors import DeadlineExceeded, RunBroken
from policy.bundled import load_tokenizer
from serve.artefacts.artefact import Artefact, flaw, load_artefact
from serve.artefacts.export import export_run
from serve.artefacts.quantize import packages_folder, quantize
from serve.artefacts.tensors import find_nonfinite, read_tensors
from serve.config import QuantizeConfig, ReplicaConfig, ServeConfig
from serve.gate.probe import FIXED_TEXT, ask, missing_kernel
from serve.gate.tasks import Tasks, heldout_tasks
from tests.serve.trained import train_to_answer

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.skipif(
        not (packages_folder() / "llmcompressor").is_dir(), reason="llm-compressor is not there; make setup-awq"
    ),
]
PROMPTS = [f"What is {number} + {number + 1}? Reply with the number only." for number in range(16)]


@pytest.fixture(scope="module")
def quantized(tiny_model, tmp_path_factory) -> tuple[Artefact, Artefact]:
    """A tiny model with layers wide enough to be worth it, and its quantised version."""
    serve_dir = tmp_path_factory.mktemp("quantized")
    folder = Path(shutil.copytree(tiny_model, serve_dir / "model"))
    tree = json.loads((folder / "config.json").read_text()) | {"hidden_size": 256, "intermediate_size": 512}
    tree |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "initializer_range": 0.05}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**tree)).save_pretrained(folder)
    full = export_run(train_to_answer(folder, PROMPTS), serve_dir)  # a random model's answers hang on single bits
    return full, quantize(full, serve_dir, QuantizeConfig(time_limit_s=280), PROMPTS, 64)


def test_a_quantised_version_is_smaller_finite_and_knows_its_parent(quantized):
    full, made = quantized
    assert flaw(made.folder) is None
    assert (made.origin.parent, made.origin.quantization) == (full.digest, "awq-w4a16-g64")
    assert made.digest != full.digest
    assert find_nonfinite(made.folder) is None
    # 4 bits and, for 64 of them, 16 of scale and 4 of zero point: 4.3 bits of 32, beside the embedding's 16 of 32
    assert made.size_bytes < 0.3 * full.size_bytes
    names = {tensor.name: tensor.dtype for tensor in read_tensors(made.folder)}
    assert names["model.layers.0.mlp.up_proj.weight_packed"] == "I32"
    assert names["model.embed_tokens.weight"] == "BF16"
    assert len(load_artefact(made.folder).measurements["calibration_sha256"]) == 64
    assert {"tokenizer.json", "chat_template.jinja"} <= set(made.files)


def test_quantising_again_gives_the_same_version(quantized):
    full, made = quantized
    again = quantize(full, full.folder.parent.parent, QuantizeConfig(time_limit_s=280), PROMPTS, 64)
    assert again.digest == made.digest


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch's own mkldnn
def test_the_engine_serves_what_the_file_says(quantized):
    full, made = quantized
    config = ServeConfig(serve_dir=full.folder.parent.parent, replica=ReplicaConfig(kv_cache_bytes=1 << 26))
    tasks = dataclasses.replace(heldout_tasks(full, 8), max_new_tokens=6)
    lacking = missing_kernel()
    if lacking:  # no 4-bit kernel on this CPU: said in one sentence, and nothing is served from it
        with pytest.raises(RunBroken, match=re.escape(lacking)):
            ask(made, tasks, config)
        return
    served = ask(made, tasks, config)
    # transformers unpacks the 4-bit weights into plain ones: another reader of the same file
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.bfloat16)
    assert served.perplexity == pytest.approx(perplexity_by_transformers(model, made.folder), rel=0.02)
    assert same_share(model, made, tasks, served.texts) >= 7 / 8  # a tie in bfloat16 may fall either way


def perplexity_by_transformers(model, folder: Path) -> float:
    tokenizer = load_tokenizer(folder)
    total, num = 0.0, 0
    for line in FIXED_TEXT.read_text().splitlines():
        ids = torch.tensor([tokenizer(line)["input_ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits.float().log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
        total, num = total - float(logprobs.sum()), num + logprobs.numel()
    return math.exp(total / num)


def same_share(model, artefact: Artefact, tasks: Tasks, texts: list[str]) -> float:
    """Share of the answers that transformers gives too, greedily."""
    tokenizer = load_tokenizer(artefact.folder)
    same = []
    for prompt, text in zip(tasks.prompts, texts, strict=True):
        ids = torch.tensor([prompt.tokens])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
        same.append(tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == text)
    return sum(same) / len(same)


def test_a_quantisation_over_its_time_limit_leaves_nothing(quantized):
    full, made = quantized
    serve_dir = full.folder.parent.parent
    with pytest.raises(DeadlineExceeded, match=r"in groups of 32 must end within 0\.5 s \(quantize\.time_limit_s\)"):
        quantize(full, serve_dir, QuantizeConfig(time_limit_s=0.5), PROMPTS, 32)
    assert {path.name for path in full.folder.parent.iterdir()} == {full.digest, made.digest}
    assert list(serve_dir.glob(".quantizing-*")) == []
