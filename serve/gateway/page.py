"""What a person sees of the server: a page to try it, live numbers as JSON, and metrics for Prometheus.

The page is one file that loads nothing: its content policy names the hashes of its one style and its one script, so
that nothing a model writes can run or reach another host.
"""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from cluster.prometheus import OwnMetrics
from serve.gateway.metrics import GatewayMetrics

PAGE = (Path(__file__).parent / "page.html").read_text(encoding="utf-8")
Replicas = Callable[[], Awaitable[Mapping[str, Any]]]


def page_router(
    metrics: GatewayMetrics, model: str, allow: Callable[[Request], object], replicas: Replicas
) -> APIRouter:
    """Routes `/`, `/status` and `/metrics`.

    `allow` raises where a request may not see numbers; `replicas` gives {healthy, wanted} by digest.
    """
    router, own = APIRouter(), OwnMetrics()

    @router.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return HTMLResponse(PAGE, headers=HEADERS)

    @router.get("/status")
    async def status(request: Request) -> JSONResponse:
        allow(request)
        shown = metrics.snapshot() | {"model": model}
        counts = await replicas()
        for version in shown["versions"]:
            version["replicas"] = counts.get(version["digest"])
        return JSONResponse(shown, headers={"cache-control": "no-store"})

    @router.get("/metrics")
    async def prometheus(request: Request) -> PlainTextResponse:
        allow(request)
        return PlainTextResponse(await own.text(), media_type="text/plain; version=0.0.4")

    return router


def content_policy(page: str) -> str:
    """The Content-Security-Policy under which a browser runs the page's own script and style and nothing else."""
    scripts, styles = (" ".join(_hashes(page, name)) for name in ("script", "style"))
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hashes(page: str, element: str) -> list[str]:
    found = re.findall(rf"<{element}>(.*?)</{element}>", page, re.S)
    return [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in found]


HEADERS = {
    "content-security-policy": content_policy(PAGE),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
