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

from core.durable import free_bytes, sync_folder, write_text
from core.errors import RunBroken, UserError
from core.sealed import File, digest_of, file_flaw, seal_file

FORMAT = 1
MANIFEST = "manifest.json"
_TEMPORARY = ".writing-"


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
        files = _seal(temporary)
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


def _seal(folder: Path) -> dict[str, File]:
    files = {}
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_file():
            raise UserError(f"an artefact must hold plain files only, got {path.name}")
        os.chmod(path, 0o644)
        files[path.name] = seal_file(path)
    return files


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
