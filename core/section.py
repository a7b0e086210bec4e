"""What every section of a configuration is: frozen, without unknown keys, with paths that can exist."""

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

LONGEST_NAME = 255  # bytes of a file's name on every usual file system
LONGEST_PATH = 3000  # Linux takes 4095 with what stands before it and what a run puts inside


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _usable_path(cls, value: Any) -> Any:
        """No shell expands the ~ in run_dir=~/runs; a name that no file can have is said here."""
        if not isinstance(value, Path):
            return value
        too_long = any(len(os.fsencode(part)) > LONGEST_NAME for part in value.parts) or len(str(value)) > LONGEST_PATH
        if "\0" in str(value) or too_long:
            raise ValueError(
                f"a path must have no NUL character, no name above {LONGEST_NAME} bytes and at most {LONGEST_PATH}"
            )
        return Path(os.path.expanduser(value))
