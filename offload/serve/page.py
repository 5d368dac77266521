"""The chat page's files, which need no API key, and what a browser may do with them."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse

_FOLDER = Path(__file__).with_name("static")
_NAMES = (
    "api.js",
    "chats.js",
    "markdown.js",
    "page.css",
    "page.js",
    "dompurify/purify.min.js",
    "marked/marked.umd.js",
)
FILES = {"/": _FOLDER / "page.html"} | {f"/static/{name}": _FOLDER / name for name in _NAMES}
# Only the page's own scripts run, and nothing is fetched from elsewhere: what a model writes is
# sanitised, and if something got through it could neither run nor send the chat away.
_HEADERS = {
    "Content-Security-Policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types dompurify",
        )
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # a newer version's files go together
}


def add_page(app: FastAPI) -> None:
    """Serve it at `/`."""

    def serve(path: str, file: Path) -> None:
        @app.get(path, include_in_schema=False)
        async def of_page() -> FileResponse:
            return FileResponse(file, headers=_HEADERS)

    for path, file in FILES.items():
        serve(path, file)
