"""Write one HTML file that needs no network, since it contains style, scripts, plotly.js and figures.

plotly.js is compressed with gzip and written in base 64. A script on the page unpacks it. A content security policy
prevents the page from loading anything.
"""

from __future__ import annotations

import base64
import gzip
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
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{text(title)}</title>
<style>{_asset("view/static/theme.css")}{_asset("report/assets/report.css")}</style>
</head>
<body>
<main>
{header}
<div class="grid">
{panels}
</div>
<footer>{subject}, written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC</footer>
</main>
<script type="text/plain" id="plotly">{_plotly()}</script>
<script>{_asset("report/assets/report.js")}</script>
</body>
</html>
"""
    # A sample may hold half of a surrogate pair, which UTF-8 cannot encode.
    replace_file(out, page.encode(errors="replace").decode())


@cache
def _plotly() -> str:
    # Import plotly only here: code that only reads a run directory does not need it.
    from plotly.offline import get_plotlyjs

    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _asset(path: str) -> str:
    return files("spurline_insight").joinpath(path).read_text(encoding="utf-8")
