"""Checkpoint folders: RUN_DIR/checkpoints/step_000123 holds the weights after 123 committed steps, whole or not at all.

A folder is filled under a name that is never taken for a checkpoint, described by manifest.json (size and sha256 of
every file), made durable, and only then renamed. What a crash leaves behind is a stale temporary folder, removed by the
next save. One process writes (the ledger's lock sees to it); anyone may read.
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from core.durable import free_bytes, sync_folder
from core.errors import RunBroken
from core.sealed import File, file_flaw, seal_file

FORMAT = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{6,})")
_TEMPORARY = ".writing-"


class FoundCheckpoint(NamedTuple):
    """The newest whole checkpoint, and one sentence for each newer one that had to be passed over."""

    step: int  # committed steps the weights have seen
    path: Path
    warnings: list[str]


def write_checkpoint(run_dir: Path, step: int, fill: Callable[[Path], None], keep: int) -> Path:
    """The folder of `step`, complete and durable, after `fill(folder)` wrote its files; older ones pruned to `keep`.

    One of the same step, whole or broken, is replaced. Checkpoints of later steps belong to steps that were rolled back
    and are removed.
    Raises RunBroken naming the path and the free space where the disk refuses; earlier checkpoints are untouched then.
    """
    if step < 0 or keep < 1:
        raise ValueError(f"step must be at least 0 and keep at least 1, got {step} and {keep} (write_checkpoint)")
    folder = run_dir / "checkpoints"
    target = folder / f"step_{step:06d}"
    temporary = folder / f"{_TEMPORARY}{target.name}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        temporary.mkdir()
        fill(temporary)
        _seal(temporary, step)
        _put_in_place(temporary, target)
    except RunBroken:  # fill's own sentence, such as a deadline
        raise
    except Exception as error:  # libraries report a full disk as OSError, RuntimeError or types of their own
        raise RunBroken(_refused(target, error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    _prune(folder, step, keep)
    return target


def newest_checkpoint(run_dir: Path) -> FoundCheckpoint | None:
    """The newest checkpoint whose files all match its manifest; None where no checkpoint was ever completed.

    Raises RunBroken where checkpoints exist and none is whole: starting again from step 0 is for a person to decide.
    """
    warnings: list[str] = []
    checkpoints = list_checkpoints(run_dir)
    for step, path in checkpoints:
        wrong = flaw(path)
        if wrong is None:
            return FoundCheckpoint(step, path, warnings)
        warnings.append(f"checkpoint {path} is not whole: {wrong}; falling back to an older one")
    if not checkpoints:
        return None
    wrongs = "; ".join(f"{path.name}: {flaw(path)}" for _, path in checkpoints[:3])
    raise RunBroken(
        f"{run_dir / 'checkpoints'} must hold a whole checkpoint, got {len(checkpoints)} broken ({wrongs}); "
        "restore one from a copy, or start again in another run_dir"
    )


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, newest first, whole or not."""
    folder = run_dir / "checkpoints"
    names = [(match, path) for path in _entries(folder) if path.is_dir() and (match := _NAME.fullmatch(path.name))]
    return sorted(((int(match[1]), path) for match, path in names), reverse=True)


def flaw(folder: Path, hashes: bool = True) -> str | None:
    """What is wrong with a checkpoint folder, in words; None where it is whole. `hashes=False` compares sizes only."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        step, written_as = int(manifest["step"]), manifest["format"]
        files = {
            name: File(int(entry["size_bytes"]), str(entry["sha256"])) for name, entry in manifest["files"].items()
        }
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    if written_as != FORMAT:
        return f"its format must be {FORMAT}, got {written_as}"
    if folder.name != f"step_{step:06d}":
        return f"its manifest is that of step {step}"
    if not files:
        return f"{MANIFEST} lists no file"
    flaws = (file_flaw(folder / name, file, hashes) for name, file in files.items())
    return next((wrong for wrong in flaws if wrong), None)


def _put_in_place(temporary: Path, target: Path) -> None:
    if target.exists():
        same = flaw(target) is None and (target / MANIFEST).read_bytes() == (temporary / MANIFEST).read_bytes()
        if same:  # saved twice: no moment without it
            return
        os.rename(target, target.parent / f"{_TEMPORARY}replaced-{target.name}")
    os.rename(temporary, target)
    sync_folder(target.parent)


def _seal(folder: Path, step: int) -> None:
    files: dict[str, dict[str, Any]] = {}
    folders = [folder]
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            raise ValueError(f"a checkpoint must hold plain files, got the link {path.name}")
        if path.is_dir():
            folders.append(path)
            continue
        name = path.relative_to(folder).as_posix()
        files[name] = seal_file(path)._asdict()
    if not files:
        raise ValueError("a checkpoint must hold at least one file, got none")
    with (folder / MANIFEST).open("w", encoding="utf-8") as stream:
        json.dump({"format": FORMAT, "step": step, "files": files}, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    for place in reversed(folders):
        sync_folder(place)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Removes later checkpoints (rolled back), broken ones, and whole ones beyond the `keep` newest; never `step`."""
    kept = 1
    for found, path in list_checkpoints(folder.parent):
        if found == step:
            continue
        if found < step and kept < keep and flaw(path, hashes=False) is None:
            kept += 1
            continue
        doomed = folder / f"{_TEMPORARY}pruned-{path.name}"  # renamed first: a kill half-way leaves no half checkpoint
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    _remove_stale(folder)


def _remove_stale(folder: Path) -> None:
    for path in _entries(folder):
        if path.name.startswith(_TEMPORARY):
            shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def _refused(target: Path, error: Exception) -> str:
    cause = " ".join(str(error).split()) or type(error).__name__
    return (
        f"checkpoint {target} could not be written: {cause}; {free_bytes(target)} bytes are free there; "
        "earlier checkpoints are untouched: make room (or a writable folder) and start again with the same run_dir"
    )
