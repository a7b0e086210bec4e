"""From a trained checkpoint to traffic.

A Ray of our own asks whoever joins it for the token it left in the home directory, and Ray reads how to answer when it
is imported: so it is said here, before any module of serving imports Ray.
"""

import os
from pathlib import Path

if (Path.home() / ".ray" / "auth_token").is_file():
    os.environ.setdefault("RAY_AUTH_MODE", "token")
