"""Write shown data as one HTML file that opens anywhere, without scripts and without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from spurline.files import replace_file
from spurline.terminal import printable
from spurline_planning.data_preview.rows import ShownData, ShownRow, ShownSequence, ShownToken

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; base-uri 'none'"

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1d1d1f; --faint: #6b6b70; --line: #d8d8dc; --box: #f6f6f8;
  --trained: #bfe8c8; --trained-odd: #a5dcb2; --context: transparent; --context-odd: #ececf0; --special: #8a3ffc; }
@media (prefers-color-scheme: dark) { :root { --paper: #16161a; --ink: #e8e8ea; --faint: #9a9aa2; --line: #3a3a42;
  --box: #1f1f25; --trained: #1d5a30; --trained-odd: #27703d; --context-odd: #2a2a32; --special: #c9a2ff; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 0 auto;
  max-width: 75rem; padding: 1rem; }
h1 { font-size: 1.3rem; overflow-wrap: anywhere; } h2 { font-size: 1rem; margin: 2rem 0 .5rem; }
.facts, .notes { color: var(--faint); margin: .2rem 0; white-space: pre-wrap; overflow-wrap: anywhere; }
.legend span { padding: 0 .4rem; margin-right: .6rem; border-radius: 3px; }
.row { display: grid; gap: .8rem; } .row.pairs { grid-template-columns: 1fr 1fr; }
@media (max-width: 40rem) { .row.pairs { grid-template-columns: 1fr; } }
.sequence { border: 1px solid var(--line); border-radius: 6px; background: var(--box); padding: .6rem .8rem;
  min-width: 0; }
.sequence h3 { font-size: .9rem; margin: 0; overflow-wrap: anywhere; }
.tokens { font: 13px/1.7 ui-monospace, monospace; white-space: pre-wrap; overflow-wrap: anywhere; margin: .5rem 0 0; }
.o { background: var(--context-odd); } .t { background: var(--trained); border-bottom: 2px solid currentColor; }
.t.o { background: var(--trained-odd); } .s { color: var(--special); font-weight: 600; }
"""


def write_page(data: ShownData, out: Path) -> None:
    """Write the page. Raises RunFailedError when the file cannot be written."""
    rows = "".join(map(_row, data.rows))
    facts = "".join(f'<p class="facts">{_safe(line)}</p>' for line in data.facts)
    trained = '<span class="t">trained</span><span class="t o">tokens</span>' if data.trains_on_it else ""
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{_safe(data.name)} · Spurline data</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{_safe(data.name)}: the first rows as they will be trained</h1>
{facts}
<p class="legend">{trained}<span>context</span>\
<span class="o">tokens</span><span class="s">special token</span></p>
{rows}
</body>
</html>
"""
    # Data may hold half a surrogate pair, which no file can.
    replace_file(out, page.encode(errors="replace").decode())


def _row(row: ShownRow) -> str:
    inside = "".join(map(_sequence, row.sequences))
    return f'<h2>{_safe(row.heading)}</h2><div class="row{" pairs" if row.is_pair else ""}">{inside}</div>'


def _sequence(sequence: ShownSequence) -> str:
    notes = "".join(f'<p class="notes">{_safe(note)}</p>' for note in sequence.notes)
    return (
        f'<div class="sequence"><h3>{_safe(sequence.heading)}</h3>{notes}'
        f'<div class="tokens">{_tokens(sequence.tokens)}</div></div>'
    )


def _tokens(tokens: Sequence[ShownToken]) -> str:
    spans: list[str] = []
    for number, token in enumerate(tokens):
        marks = (("t", token.is_trained), ("o", number % 2 == 1), ("s", token.is_special))
        css = " ".join(name for name, holds in marks if holds)
        weight = f", weight {token.weight:g}" if token.is_trained else ""
        spans.append(f'<span class="{css}" title="{number}: id {token.token_id}{weight}">{_safe(token.text)}</span>')
    return "".join(spans)


def _safe(value: str) -> str:
    return html.escape(printable(value), quote=True)
