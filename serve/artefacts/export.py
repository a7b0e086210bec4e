"""The artefact of a run or of a model: what a server needs of it, copied whole and found fit to serve."""

import json
import shutil
from pathlib import Path

from core.checkpoint import MANIFEST as CHECKPOINT_MANIFEST
from core.checkpoint import FoundCheckpoint, newest_checkpoint
from core.config import Config, load_config
from core.errors import RunBroken, UserError
from core.sealed import File, file_flaw
from policy.bundled import load_tokenizer, resolve_model
from serve.artefacts.artefact import MANIFEST, Artefact, Origin, store
from serve.artefacts.skeleton import find_missing
from serve.artefacts.tensors import find_nonfinite

_KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # what a server loads of a model folder
_NUM_TRIES = 3  # a run that goes on prunes the checkpoint that is being copied


def export_run(source: Path | str, serve_dir: Path) -> Artefact:
    """The artefact of a run's newest whole checkpoint, or of a model (a folder in Hugging Face format, smollm2-135m).

    A no-op where the same files were exported before. Raises UserError where the tokenizer or its chat template is
    missing or a weight is NaN or infinite, and RunBroken where the run's checkpoints are all damaged.
    """
    if not (Path(source) / "config.yaml").is_file():
        model = resolve_model(str(source))
        return store(serve_dir, lambda target: _fill(target, model, None), Origin(str(source)))
    run = Path(source).absolute()
    config: Config = load_config(run / "config.yaml")
    for left in reversed(range(_NUM_TRIES)):
        found = newest_checkpoint(run)
        if found is None:
            raise UserError(f"{run} must hold a checkpoint, got none; let the run reach checkpoint.every steps first")
        try:
            return _export_checkpoint(run, found, config, serve_dir)
        except (UserError, RunBroken):
            if left and not found.path.is_dir():  # pruned meanwhile; there is a newer one
                continue
            raise
    raise AssertionError("the last try returns or raises")


def _export_checkpoint(run: Path, found: FoundCheckpoint, config: Config, serve_dir: Path) -> Artefact:
    policy = found.path / "policy"
    tree = json.loads((found.path / CHECKPOINT_MANIFEST).read_text(encoding="utf-8"))["files"]
    files = {name: File(entry["size_bytes"], entry["sha256"]) for name, entry in tree.items()}

    def fill(target: Path) -> None:
        _fill(target, policy, None if (policy / "tokenizer_config.json").is_file() else config.policy.model)
        # What was copied is what was found whole: the checkpoint may have been pruned or replaced in between.
        copies = (
            (target / Path(name).name, file) for name, file in files.items() if Path(name).parent.name == "policy"
        )
        wrong = next((sentence for path, file in copies if path.exists() and (sentence := file_flaw(path, file))), None)
        if wrong:
            raise UserError(f"checkpoint {found.path} must stay whole while it is exported, got: {wrong}; try again")

    config_tree = config.model_dump(mode="json")
    return store(serve_dir, fill, Origin(str(run), found.step, config=config_tree, notes=tuple(found.warnings)))


def _fill(target: Path, model: Path, tokenizer_of: str | None) -> None:
    """Copies a model's files, and from `tokenizer_of` those the folder lacks; refuses what could not be served."""
    for place in [model, *([resolve_model(tokenizer_of)] if tokenizer_of else [])]:
        for pattern in _KEPT if place is model else _KEPT[1:]:
            for path in sorted(place.glob(pattern)):
                if path.name != MANIFEST and not (target / path.name).exists():
                    shutil.copyfile(path, target / path.name)
    if not (target / "config.json").is_file():
        raise UserError(f"a model must have a config.json, got none in {model}; save it with save_pretrained")
    if load_tokenizer(target).chat_template is None:
        raise UserError(
            f"the tokenizer must have a chat template to be served, got none in {model}; "
            "put a chat_template.jinja beside it"
        )
    missing = find_missing(target)
    if missing:
        raise UserError(f"the weights of {model} must be whole, got none for {', '.join(missing[:3])}; save it again")
    bad = find_nonfinite(target)
    if bad:
        raise UserError(f"the weights of {model} must be finite, got {bad}; export an earlier checkpoint")
