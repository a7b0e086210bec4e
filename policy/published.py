"""Where new weights lie between learner and rollout workers of one host: a folder a version, in shared memory."""

import os
import shutil
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "grpo-weights-"
COPIES = 3  # the version being written, the one in use, and the one before it


class PublishedWeights:
    """Folders of weight versions; they are gone with close(), or at the next start where the owner was killed."""

    def __init__(self, run_dir: Path, version_bytes: int) -> None:
        remove_orphans()
        roomy = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > COPIES * version_bytes
        self.root = (SHARED_MEMORY if roomy else run_dir.resolve()) / f"{PREFIX}{os.getpid()}"
        self.root.mkdir(parents=True, exist_ok=True)

    def folder(self, version: int) -> Path:
        """Where this version is, or is to be written."""
        return self.root / f"version-{version}"

    def prune(self, version: int) -> None:
        """Removes versions older than the one before `version`; that one is what a failed load falls back to."""
        folders = sorted(self.root.glob("version-*"), key=lambda path: int(path.name.rsplit("-", 1)[1]))
        keep = [path for path in folders if int(path.name.rsplit("-", 1)[1]) <= version][-2:]
        for path in folders:
            if path not in keep and int(path.name.rsplit("-", 1)[1]) < version:
                shutil.rmtree(path, ignore_errors=True)

    def close(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


def remove_orphans() -> None:
    """Removes folders in shared memory whose owner is gone."""
    for path in SHARED_MEMORY.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX)
        if owner.isdigit() and not psutil.pid_exists(int(owner)):
            shutil.rmtree(path, ignore_errors=True)
