"""Where the running server of a serving folder is: SERVE_DIR/serving.json, there while it runs."""

import json
from pathlib import Path

import psutil

RECORD = "serving.json"


def running_server(serve_dir: Path) -> dict[str, str] | None:
    """What the running server of a serving folder wrote down; None where none runs."""
    try:
        record: dict[str, str] = json.loads((serve_dir / RECORD).read_text(encoding="utf-8"))
        if psutil.Process(int(record["pid"])).create_time() != float(record["began"]):
            return None  # the number is another process's now, as after every restart of a container
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
    return record
