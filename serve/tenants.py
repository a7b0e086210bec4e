"""API keys: who asks. Only their SHA-256 is kept; `python -m serve.tenants new NAME` makes one."""

import argparse
import hashlib
import hmac
import logging
import re
import secrets
import stat
from pathlib import Path
from typing import Self

from core.errors import UserError

KEY_PREFIX = "sk-"  # what scanners for leaked keys look for
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_BEARER = re.compile(r"bearer +(\S+) *", re.IGNORECASE)

logger = logging.getLogger(__name__)


class Tenants:
    """The tenants of a file of keys. A tenant may have several keys, which is how one is replaced."""

    def __init__(self, tenant_of_hash: dict[bytes, str]) -> None:
        self._tenant_of_hash = tenant_of_hash

    @classmethod
    def load(cls, path: Path) -> Self:
        """From lines `tenant sha256-of-key`, # starting a comment; UserError names the line that is wrong."""
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
            mode = path.stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"gateway.api_keys must be a readable text file, got {path}: {error}") from None
        if mode & (stat.S_IWGRP | stat.S_IWOTH):  # reading is harmless: no key follows from its hash
            logger.warning("%s should be writable by its owner only: who can write it can let anyone in", path)
        found: dict[bytes, str] = {}
        for number, line in enumerate(lines, start=1):
            words = line.partition("#")[0].split()
            if words:
                where = f"{path} line {number}"
                name, digest = _entry(words, where)
                if found.setdefault(digest, name) != name:
                    raise UserError(f"a key must belong to one tenant, got {found[digest]} and {name} ({where})")
        if not found:
            raise UserError(f"gateway.api_keys must hold at least one key, got none ({path}); {_advice('NAME')}")
        return cls(found)

    def tenant_of(self, authorization: str | None) -> str | None:
        """The tenant of an `Authorization: Bearer KEY` header; None for no key or an unknown one.

        Compares with every key, each in constant time: the time says nothing about how close a guess was.
        """
        match = _BEARER.fullmatch(authorization or "")
        if match is None:
            return None
        digest = _hash(match[1])
        tenant = None
        for known, name in self._tenant_of_hash.items():
            if hmac.compare_digest(known, digest):
                tenant = name
        return tenant


def _entry(words: list[str], where: str) -> tuple[str, bytes]:
    """(tenant, digest) of a line; errors never repeat what may be a key."""
    name = words[0]
    if len(words) != 2 or not _NAME.fullmatch(name):
        raise UserError(
            f"a line must be `tenant sha256-of-key`, the tenant of at most 64 letters, digits, . _ or -, got "
            f"{len(words)} words ({where}); {_advice('NAME')}"
        )
    if not _HASH.fullmatch(words[1].lower()):
        raise UserError(
            f"the key of {name} must be given as its SHA-256 of 64 hex digits, got {len(words[1])} other characters "
            f"({where}); if it is the key itself, it has been seen: {_advice(name)}"
        )
    return name, bytes.fromhex(words[1])


def _advice(name: str) -> str:
    return f"make a new one with `python -m serve.tenants new {name}`"


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def main(words: list[str] | None = None) -> None:
    """Prints a new key, once, and the line of the file that lets it in."""
    parser = argparse.ArgumentParser(prog="python -m serve.tenants", description="Make an API key.")
    new = parser.add_subparsers(required=True, metavar="new").add_parser("new", help="a new key of a tenant")
    new.add_argument("name", metavar="NAME", help="the tenant")
    name = parser.parse_args(words).name
    if not _NAME.fullmatch(name):
        parser.error(f"NAME must be at most 64 letters, digits, . _ or -, got {name!r}")
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    print(f"The key, shown this once; the tenant sends it as `Authorization: Bearer KEY`:\n{key}\n")
    print(f"The line for the file of gateway.api_keys:\n{name} {_hash(key).hex()}")


if __name__ == "__main__":
    main()
