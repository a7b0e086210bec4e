"""Artefacts: SERVE_DIR/artefacts/DIGEST holds one version of the model as it is served, whole or not at all, for ever.

The digest is the version: a sha256 over the names and hashes of the folder's files, so equal weights, tokenizer and
chat template are one version wherever they came from. What is learned about a version later (the gate's verdict,
speeds) stands in manifest.json, which is not hashed.
"""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from core.checkpoint import MANIFEST as CHECKPOINT_MANIFEST
from core.checkpoint import FoundCheckpoint, newest_checkpoint
from core.config import Config, load_config
from core.durable import free_bytes, sync_folder, write_text
from core.errors import RunBroken, UserError
from policy.bundled import load_tokenizer, resolve_model
from serve.artefacts.sealed import File, digest_of, file_flaw, seal
from serve.artefacts.skeleton import find_missing
from serve.artefacts.tensors import find_nonfinite

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".writing-"
_KEPT = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt")  # what a server loads of a model folder
_NUM_TRIES = 3  # a run that goes on prunes the checkpoint that is being copied


@dataclass(frozen=True)
class Origin:
    """Where a version comes from."""

    source: str  # run folder, model folder, or the digest it was quantised from
    step: int | None = None  # committed steps the weights have seen; None: not of a run
    parent: str | None = None  # digest it was made from
    quantization: str = "none"  # or awq-w4a16-g64
    config: dict[str, Any] | None = None  # the run's
    notes: tuple[str, ...] = ()  # what a person should know, a sentence each


@dataclass(frozen=True)
class Artefact:
    """A version on disk."""

    folder: Path
    digest: str  # 64 hex digits
    files: dict[str, File]
    origin: Origin
    created: str  # UTC, ISO 8601
    gate: dict[str, Any] | None  # the verdict; None: not judged yet
    measurements: dict[str, Any]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files.values())


def artefacts_folder(serve_dir: Path) -> Path:
    return serve_dir / "artefacts"


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


def store(serve_dir: Path, fill: Callable[[Path], None], origin: Origin) -> Artefact:
    """The artefact of the files that `fill(folder)` writes; the one already there where those files are known.

    Raises RunBroken naming the path and the free space where the disk refuses; UserErrors of `fill` pass.
    """
    root = artefacts_folder(serve_dir)
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_stale(root)
        temporary = Path(tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=root))
    except OSError as error:
        raise RunBroken(f"an artefact needs a folder that can be written, got {root}: {error.strerror}") from error
    try:
        fill(temporary)
        files = seal(temporary)
        digest = digest_of(files)
        created = datetime.now(UTC).isoformat(timespec="seconds")
        if not any(name.endswith(".safetensors") for name in files):
            raise UserError(f"an artefact must hold a safetensors file, got {', '.join(files) or 'nothing'}")
        made = Artefact(root / digest, digest, files, origin, created, None, {})
        write_text(temporary / MANIFEST, _manifest(made))
        os.chmod(temporary, 0o755)
        sync_folder(temporary)
        _put_in_place(temporary, made.folder)
    except OSError as error:
        raise RunBroken(f"an artefact must fit into {root}, got {error}; {free_bytes(root)} bytes are free") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return load_artefact(made.folder)


def load_artefact(folder: Path) -> Artefact:
    """The artefact of a folder, whose manifest alone is read; UserError where that cannot be. See `flaw`."""
    try:
        tree = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if tree["format"] != FORMAT:
            raise UserError(f"the format of {folder / MANIFEST} must be {FORMAT}, got {tree['format']!r}")
        files = {str(name): File(int(e["size_bytes"]), str(e["sha256"])) for name, e in tree["files"].items()}
        known = {field.name: tree[field.name] for field in fields(Origin)}
        origin = Origin(**{**known, "notes": tuple(known["notes"])})
        return Artefact(
            folder, str(tree["digest"]), files, origin, tree["created"], tree["gate"], dict(tree["measurements"])
        )
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"an artefact must have a {MANIFEST}, got none in {folder}; export it again") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{folder / MANIFEST} must be that of an artefact, got {type(error).__name__}: {error}; export it again"
        ) from None


def flaw(folder: Path, hashes: bool = True) -> str | None:
    """What is wrong with an artefact's folder, in words; None where it is whole. `hashes=False` compares sizes only."""
    try:
        artefact = load_artefact(folder)
    except UserError as error:
        return str(error)
    if artefact.digest != folder.name:
        return f"its manifest is that of {artefact.digest}"
    if digest_of(artefact.files) != artefact.digest:
        return f"its digest is not that of the files in {MANIFEST}"
    # A stray safetensors file would be loaded with the others. The third is there while a manifest is replaced.
    known = {*artefact.files, MANIFEST, f".{MANIFEST}.tmp"}
    strange = sorted(path.name for path in folder.iterdir() if path.name not in known)
    if strange:
        return f"{strange[0]} does not belong to it"
    flaws = (file_flaw(folder / name, file, hashes) for name, file in artefact.files.items())
    return next((wrong for wrong in flaws if wrong), None)


def record(artefact: Artefact, gate: dict[str, Any] | None = None, **measurements: Any) -> Artefact:
    """The artefact with a verdict and measurements added to its manifest; its files and its digest stay."""
    newest = load_artefact(artefact.folder)
    changed = replace(newest, gate=gate or newest.gate, measurements={**newest.measurements, **measurements})
    write_text(changed.folder / MANIFEST, _manifest(changed))
    return changed


def _manifest(artefact: Artefact) -> str:
    files = {name: file._asdict() for name, file in sorted(artefact.files.items())}
    tree = {"format": FORMAT, "digest": artefact.digest, "files": files, **asdict(artefact.origin)}
    rest = {"created": artefact.created, "gate": artefact.gate, "measurements": artefact.measurements}
    return json.dumps(tree | rest, indent=1, allow_nan=False) + "\n"


def _put_in_place(temporary: Path, target: Path) -> None:
    """Renames a finished folder to its digest, unless a whole one is there: by then it may be serving."""
    if target.exists() and flaw(target) is not None:
        os.rename(target, target.with_name(f"{_TEMPORARY}{os.getpid()}-replaced-{target.name}"))
        _remove_stale(target.parent, own=True)
    try:
        os.rename(temporary, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
    sync_folder(target.parent)


def _remove_stale(root: Path, own: bool = False) -> None:
    """Removes what a killed process left half-written; `own`: what this process has renamed away."""
    for path in root.glob(f"{_TEMPORARY}*"):
        pid = path.name.removeprefix(_TEMPORARY).partition("-")[0]
        replaced = own and path.name.startswith(f"{_TEMPORARY}{os.getpid()}-replaced-")
        if replaced or not (pid.isdigit() and psutil.pid_exists(int(pid))):
            shutil.rmtree(path, ignore_errors=True)


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
