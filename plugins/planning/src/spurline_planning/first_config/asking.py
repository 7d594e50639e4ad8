"""Ask questions on a terminal, or take what is usual instead."""

from __future__ import annotations

import typer

from spurline.errors import UserError


class Asker:
    """Asks on a terminal; if it may not, it takes the default, or refuses if there is none."""

    def __init__(self, *, may_ask: bool) -> None:
        self._may_ask = may_ask

    def text(self, question: str, option: str, default: str | None = None) -> str:
        if self._may_ask:
            return str(typer.prompt(question, default=default, err=True))
        if default is None:
            raise UserError(
                f"{option} is missing: {question[0].lower()}{question[1:]}. Give it, or run this in a terminal."
            )
        return default

    def yes(self, question: str, *, default: bool) -> bool:
        return typer.confirm(question, default=default, err=True) if self._may_ask else default
