"""Where the running server of a serving folder is: SERVE_DIR/serving.json, there while it runs."""

import json
import os
from pathlib import Path

RECORD = "serving.json"


def running_server(serve_dir: Path) -> dict[str, str] | None:
    """What the running server of a serving folder wrote down; None where none runs."""
    try:
        record: dict[str, str] = json.loads((serve_dir / RECORD).read_text(encoding="utf-8"))
        os.kill(int(record["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return None
    return record
