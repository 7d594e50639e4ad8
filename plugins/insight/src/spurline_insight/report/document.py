"""Write one HTML file that needs no network, since it contains style, scripts, plotly.js and figures.

plotly.js and the figures are compressed with gzip and written in base 85, so that most pages have less than 2 MB. A
script on the page unpacks them. A content security policy prevents the page from loading anything.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files
from pathlib import Path

from spurline.files import replace_file
from spurline_insight.report.markup import text

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval' blob:; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:; form-action 'none'; base-uri 'none'"
)
_FIGURE = re.compile(r'(<script type="application/json" class="figure">)(.*?)(</script>)', re.DOTALL)
_SAFE = bytes.maketrans(b"<>&", b",.:")
"""Replaces the characters of Python's base 85 that could begin markup inside a script element."""
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%:()*+-;,=.?@^_`{|}~"
"""The 85 digits of packed text."""


def write_page(out: Path, title: str, header: str, sections: Iterable[tuple[str, str]], subject: str) -> None:
    """Write a page of sections.

    Args:
        out: The file.
        title: The title of the page.
        header: The beginning of the page as HTML.
        sections: The heading of each section, and its content as HTML, which may contain figures made by `figure`.
        subject: HTML for the last line, such as `Spurline report of ...`.
    """
    panels = "".join(f'<section class="panel"><h2>{text(head)}</h2>{content}</section>' for head, content in sections)
    page = _document(
        title,
        f"""{header}
<div class="grid">
{panels}
</div>
<footer>{subject}, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</footer>""",
    )
    # A sample may hold half of a surrogate pair, which UTF-8 cannot encode.
    replace_file(out, page.encode(errors="replace").decode())


def _document(title: str, body: str) -> str:
    figures: list[str] = []

    def take(found: re.Match[str]) -> str:
        figures.append(found[2])
        return found[1] + found[3]

    body = _FIGURE.sub(take, body)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)}</title>
<style>{_asset("report.css")}</style>
<script type="text/plain" id="plotly">{_plotly()}</script>
<script>const ALPHABET = "{DIGITS}";
{_asset("unpack.js")}</script>
</head>
<body>
<main>
{body}
</main>
<script type="text/plain" id="figures">{packed(f"[{','.join(figures)}]")}</script>
<script>{_asset("report.js")}</script>
</body>
</html>
"""


def packed(content: str) -> str:
    """Return the text as gzip in base 85, safe inside a script element. Equal texts give equal results."""
    # A sample may hold half of a surrogate pair, which UTF-8 cannot encode.
    compressed = gzip.compress(content.encode(errors="replace"), 9, mtime=0)
    return base64.b85encode(compressed).translate(_SAFE).decode()


@cache
def _plotly() -> str:
    # Code that only reads a run directory does not need plotly.
    from plotly.offline import get_plotlyjs

    return packed(get_plotlyjs())


def _asset(name: str) -> str:
    return files("spurline_insight.report").joinpath("assets", name).read_text(encoding="utf-8")
