import hashlib
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest

from core.errors import UserError
from serve.tenants import Tenants, main

pytestmark = pytest.mark.fast
PROJECT = Path(__file__).resolve().parents[2]


def line(tenant: str, key: str) -> str:
    return f"{tenant} {hashlib.sha256(key.encode()).hexdigest()}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_a_key_names_its_tenant_and_a_tenant_may_have_several(tmp_path):
    text = f"# who may ask\n\n{line('acme', 'k1')}{line('umbrella', 'k2').strip()}   # by hand\n{line('acme', 'k3')}"
    tenants = Tenants.load(written(tmp_path, text))
    answers = {key: tenants.tenant_of(f"Bearer {key}") for key in ("k1", "k2", "k3", "k4", "K1", "k")}
    assert answers == {"k1": "acme", "k2": "umbrella", "k3": "acme", "k4": None, "K1": None, "k": None}


@pytest.mark.parametrize("header", ["Bearer key", "bearer key", "BEARER   key", "Bearer key "])
def test_the_scheme_may_be_spelt_as_http_allows(tmp_path, header):
    assert Tenants.load(written(tmp_path, line("acme", "key"))).tenant_of(header) == "acme"


@pytest.mark.parametrize(
    "header",
    [
        *(
            None,
            "",
            "key",
            "Bearer",
            "Bearer ",
            "Bearerkey",
            "Basic key",
            "Bearer key key",
            "Bearer\nkey",
            "Bearer kéy",
        ),
        *("Bearer \udce9", "Bearer " + hashlib.sha256(b"key").hexdigest(), "Bearer " + "k" * 100_000),
    ],
)
def test_any_other_header_is_nobody(tmp_path, header):
    assert Tenants.load(written(tmp_path, line("acme", "key"))).tenant_of(header) is None


def test_upper_case_digits_and_windows_line_ends_are_the_same_hash(tmp_path):
    digest = hashlib.sha256(b"key").hexdigest().upper()
    assert Tenants.load(written(tmp_path, f"acme {digest}\r\n")).tenant_of("Bearer key") == "acme"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "must hold at least one key, got none"),
        ("# nothing\n", "must hold at least one key, got none"),
        ("acme sk-secret", "must be given as its SHA-256 of 64 hex digits, got 9 other characters"),
        ("acme " + "z" * 64, "must be given as its SHA-256 of 64 hex digits, got 64 other characters"),
        ("acme " + "a" * 63, "got 63 other characters"),
        ("sk-secret", "must be `tenant sha256-of-key`"),
        (f"acme corp {'a' * 64}", "got 3 words"),
        (f"a:b {'a' * 64}", "the tenant of at most 64 letters, digits, . _ or -"),
        (f"{'a' * 65} {'a' * 64}", "the tenant of at most 64 letters"),
        (line("acme", "key") + line("umbrella", "key"), "must belong to one tenant, got acme and umbrella"),
    ],
)
def test_a_wrong_line_is_refused_by_its_number_without_repeating_what_may_be_a_key(tmp_path, text, sentence):
    with pytest.raises(UserError, match=re.escape(sentence)) as raised:
        Tenants.load(written(tmp_path, "\n# comment\n" + text))
    num_lines = 2 + text.count("\n") + (not text.endswith("\n"))
    assert f"line {num_lines}" in str(raised.value) or "got none" in sentence
    assert "secret" not in str(raised.value)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path):
    with pytest.raises(UserError, match=r"gateway\.api_keys must be a readable text file, got .*missing"):
        Tenants.load(tmp_path / "missing")
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="must be a readable text file"):
        Tenants.load(path)


@pytest.mark.parametrize(("mode", "num_warnings"), [(0o600, 0), (0o644, 0), (0o660, 1), (0o646, 1)])
def test_a_file_that_others_can_write_is_warned_about(tmp_path, caplog, mode, num_warnings):
    path = written(tmp_path, line("acme", "key"))
    path.chmod(mode)
    with caplog.at_level(logging.WARNING):
        Tenants.load(path)
    assert len(caplog.records) == num_warnings


def test_the_command_makes_a_key_and_the_line_that_lets_it_in(tmp_path):
    command = [sys.executable, "-m", "serve.tenants", "new", "acme"]
    shown = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=True).stdout
    key, entry = shown.splitlines()[1], shown.splitlines()[-1]
    assert re.fullmatch(r"sk-[\w-]{43}", key)  # 32 random bytes
    assert key not in entry
    assert Tenants.load(written(tmp_path, entry)).tenant_of(f"Bearer {key}") == "acme"


def test_the_command_never_gives_the_same_key_twice(capsys):
    main(["new", "acme"])
    main(["new", "acme"])
    keys = re.findall(r"^sk-.*$", capsys.readouterr().out, re.M)
    assert len(set(keys)) == 2


def test_the_command_refuses_a_name_the_file_could_not_hold(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["new", "two words"])
    assert ended.value.code == 2
    assert "NAME must be at most 64 letters" in capsys.readouterr().err
