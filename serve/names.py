"""Names in Ray Serve."""

GATEWAY = "gateway"


def application_of(digest: str) -> str:
    """The application that serves a version: one a digest, so that two stand beside each other."""
    return f"version-{digest[:16]}"
