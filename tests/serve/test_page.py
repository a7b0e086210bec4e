"""The page in a real browser, on a real server: it streams, it tells, it loads nothing and runs nothing but itself."""

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.serve.browser import Browser
from tests.serve.small_server import CANARY, STABLE, SmallServer, listening

pytestmark = pytest.mark.process
EVIL = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>&amp; é漢🦙"


@pytest.fixture(scope="module")
def small() -> Iterator[tuple[SmallServer, str]]:
    """A SmallServer and its URL."""
    server = SmallServer()
    with listening(server.app) as url:
        yield server, url


@pytest.fixture(scope="module")
def browser(tmp_path_factory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(small, browser) -> Iterator[Browser]:
    """The page, freshly loaded and told the first numbers; whatever a test does in it, nothing was complained of."""
    server, url = small
    server.needs_key = False
    browser.requests.clear()
    browser.complaints.clear()
    browser.send("Page.navigate", url=f"{url}/")
    browser.wait("document.readyState === 'complete' && document.getElementById('health').textContent === 'serving'")
    yield browser
    assert {request["url"].split("/")[2] for request in browser.requests} == {url.split("/")[2]}


def send(page: Browser, prompt: str, **fields: Any) -> None:
    values = {"prompt": prompt, **fields}
    page.run(
        f"for (const [id, value] of Object.entries({json.dumps(values)})) document.getElementById(id).value = value;"
        "document.getElementById('send').click()"
    )


def text(page: Browser, name: str) -> str:
    found = page.run(f"document.getElementById('{name}').textContent")
    assert isinstance(found, str)
    return found


def ended(page: Browser) -> None:
    page.wait("!document.getElementById('send').disabled")


def test_an_answer_streams_in_with_its_version_and_where_it_came_from(page, small):
    server, _ = small
    server.may_go_on.clear()
    send(page, "What is 7 + 5?", temperature="0.7", tokens="9")
    page.wait("document.getElementById('answer').textContent === 'What '")
    server.may_go_on.set()
    ended(page)
    assert text(page, "answer") == "What is 7 + 5?"
    assert (text(page, "version"), text(page, "reason")) == (STABLE[:12], "stop")
    assert text(page, "source") == ("hit" if len(server.asked) % 2 == 0 else "miss")
    assert re.fullmatch(r"[\d.]+ m?s", text(page, "first"))
    asked = server.asked[-1]
    assert (asked["model"], asked["temperature"], asked["max_tokens"], asked["stream"]) == ("policy", 0.7, 9, True)
    assert page.complaints == []


def test_what_a_model_writes_is_shown_and_never_run(page):
    send(page, EVIL)
    ended(page)
    assert text(page, "answer") == EVIL
    assert page.run("document.title") == "Policy server"
    assert page.run("document.getElementById('answer').children.length") == 0
    assert page.complaints == []


def test_a_script_that_got_into_the_page_would_not_run_and_could_not_call_out(page):
    page.run("document.body.append(Object.assign(document.createElement('script'), {text: \"document.title='run'\"}))")
    refused = page.run("fetch('http://127.0.0.2:9/').then(() => 'sent', () => 'refused')")
    assert (page.run("document.title"), refused) == ("Policy server", "refused")
    assert any("inline script violates" in text for text in page.complaints)
    assert any("http://127.0.0.2:9/" in text and "connect-src" in text for text in page.complaints)


def test_a_refusal_is_said_in_the_servers_words(page):
    send(page, "too long")
    ended(page)
    assert text(page, "error") == "400: max_tokens must be at most 8, got 99"
    assert page.run("document.getElementById('error').getAttribute('role')") == "alert"


def test_an_answer_that_breaks_off_is_not_shown_as_a_whole_one(page):
    send(page, "break off")
    ended(page)
    assert (text(page, "answer"), text(page, "whole")) == ("break off", "-")
    assert text(page, "error") == "the answer broke off; send it again"


def test_stop_ends_the_answer_for_the_server_too(page, small):
    server, _ = small
    before = server.num_given_up
    send(page, "for ever")
    page.wait("document.getElementById('answer').textContent.length > 6")
    page.run("document.getElementById('stop').click()")
    ended(page)
    assert text(page, "reason") == "stopped here"
    until = time.monotonic() + 10
    while server.num_given_up == before and time.monotonic() < until:
        time.sleep(0.05)
    assert server.num_given_up == before + 1


def test_compute_anew_asks_for_no_cache_and_only_then(page, small):
    server, _ = small
    send(page, "one")
    ended(page)
    assert "cache-control" not in server.headers[-1]
    page.run("document.getElementById('fresh').checked = true")
    send(page, "two")
    ended(page)
    assert server.headers[-1]["cache-control"] == "no-cache"


def test_a_key_is_sent_and_kept_nowhere(page, small):
    server, _ = small
    server.needs_key = True
    page.wait("document.getElementById('health').textContent === 'key needed'")
    send(page, "hello", key="secret-key")
    ended(page)
    assert text(page, "answer") == "hello"
    page.wait("document.getElementById('health').textContent === 'serving'")
    kept = page.run("JSON.stringify([Object.entries(localStorage), Object.entries(sessionStorage), document.cookie])")
    assert kept == '[[],[],""]'
    assert "secret-key" not in page.run("location.href + document.documentElement.outerHTML")


def test_numbers_versions_and_curves_come_by_themselves(page):
    send(page, "one")
    ended(page)
    page.wait(
        "document.querySelectorAll('#latency path').length === 2 && document.getElementById('p50').textContent !== '-'"
    )
    page.wait("document.querySelector('#latency path').getAttribute('d').includes('L')", 20)  # two points make a line
    rows = page.run("[...document.querySelectorAll('#versions tr')].map((r) => [...r.cells].map((c) => c.textContent))")
    assert [row[:3] for row in rows] == [["stable", STABLE[:12], "75 %"], ["canary", CANARY[:12], "25 %"]]
    assert [row[4] for row in rows] == ["1 of 2", "-"]
    assert (text(page, "breaker"), text(page, "flight")) == ("half open", "0")
    assert "median" in page.run("document.getElementById('latency').getAttribute('aria-label')")
    assert page.complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_it_fits_a_phone_and_a_desk_in_light_and_dark(page, scheme, width, tmp_path):
    page.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    page.send("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=width < 600)
    assert page.run("document.documentElement.scrollWidth") <= width
    ink, paper = page.run(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
        ".map((color) => color.match(/\\d+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0))"
    )
    assert (ink < paper) == (scheme == "light")
    page.send("Emulation.clearDeviceMetricsOverride")


def test_every_control_has_a_name_and_is_reached_by_the_keyboard(page):
    nodes = page.send("Accessibility.getFullAXTree")["nodes"]
    controls = [n for n in nodes if n.get("role", {}).get("value") in ("textbox", "spinbutton", "button", "checkbox")]
    names = [node["name"]["value"] for node in controls]
    assert len(controls) == 7
    assert all(names)
    reached = set()
    page.run("document.body.focus()")
    for _ in range(12):
        for kind in ("keyDown", "keyUp"):
            page.send("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(page.run("document.activeElement.id"))
    assert {"prompt", "temperature", "tokens", "key", "send", "fresh"} <= reached


def test_the_routes_themselves_tell_no_one_without_a_key(small):
    server, url = small
    server.needs_key = True
    assert [httpx.get(url + path).status_code for path in ("/", "/status", "/metrics")] == [200, 401, 401]
    allowed = httpx.get(f"{url}/status", headers={"authorization": "Bearer secret-key"})
    assert (allowed.status_code, allowed.json()["model"]) == (200, "policy")
    server.needs_key = False


def test_the_page_forbids_to_be_framed_and_names_no_other_host(small):
    _, url = small
    answer = httpx.get(url)
    policy = answer.headers["content-security-policy"]
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    hosts = set(re.findall(r"https?://([^/\"' ]+)", answer.text))
    assert hosts == {"www.w3.org"}  # the name of SVG's namespace, which nobody fetches
