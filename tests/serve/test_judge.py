"""The gate on a real engine, which starts once a version."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from data.template import template_tokens
from policy.bundled import load_tokenizer
from serve.artefacts.artefact import Artefact, Origin, load_artefact, store
from serve.artefacts.export import export_run
from serve.config import ReplicaConfig, ServeConfig
from serve.gate.tasks import Tasks
from serve.gate.verdict import judge
from tests.serve.trained import tasks_of, train_to_answer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def real_tasks(artefact: Artefact, num: int) -> Tasks:
    tokenizer = load_tokenizer(artefact.folder)
    prompts = tuple(
        replace(prompt, tokens=tuple(template_tokens(tokenizer, [{"role": "user", "content": prompt.text}])))
        for prompt in tasks_of(num).prompts
    )
    return replace(tasks_of(num), prompts=prompts)


def same_weights(artefact: Artefact, serve_dir: Path) -> Artefact:
    """Another version with the same weights: an engine of its own is asked."""

    def fill(folder: Path) -> None:
        for name in artefact.files:
            shutil.copyfile(artefact.folder / name, folder / name)
        (folder / "notes.json").write_text("{}")

    return store(serve_dir, fill, Origin("a copy", parent=artefact.digest))


def test_a_trained_model_passes_against_its_copy_and_the_manifest_says_so(tiny_model, tmp_path):
    questions = [prompt.text for prompt in tasks_of(350).prompts]
    model = train_to_answer(Path(shutil.copytree(tiny_model, tmp_path / "model")), questions[::25])
    full = export_run(model, tmp_path)
    said: list[str] = []
    config = ServeConfig(serve_dir=tmp_path, replica=ReplicaConfig(kv_cache_bytes=1 << 26))
    copy = same_weights(full, tmp_path)
    verdict = judge(full, copy, config, real_tasks(full, 350), said.append)
    assert verdict.passed, verdict.reasons
    assert verdict.full_reward == verdict.candidate_reward
    assert verdict.full_reward is not None
    assert verdict.full_reward > 0.97
    # None lost of about 350 right answers: the bound is near 3.3 / 350
    assert verdict.upper_bound == pytest.approx(3.3 / (350 * verdict.full_reward), rel=0.05)
    assert verdict.perplexity_full == verdict.perplexity_candidate
    stored = load_artefact(copy.folder)
    assert json.loads(json.dumps(stored.gate))["passed"] is True
    assert stored.measurements["tokens_per_s"] > 0
    assert stored.measurements["size_bytes"] == copy.size_bytes
    assert load_artefact(full.folder).measurements["tokens_per_s"] > 0


def test_a_version_the_engine_cannot_load_is_refused_with_its_words(tiny_model, tmp_path):
    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:64].clone()  # half of it; all numbers are finite, every hash is right
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    made = export_run(folder, tmp_path)
    config = ServeConfig(serve_dir=tmp_path, replica=ReplicaConfig(kv_cache_bytes=1 << 26))
    verdict = judge(None, made, config, real_tasks(made, 2))
    assert not verdict.passed
    assert "the candidate must answer on the engine that will serve it" in verdict.reasons[0]
    assert "its process exited with status 1" in verdict.reasons[0]
