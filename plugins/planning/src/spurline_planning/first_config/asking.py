"""Questions on a terminal, or what is usual instead."""

from __future__ import annotations

import typer

from spurline.errors import UserError


class Asker:
    """Asks on a terminal. may_ask: False takes the default, or refuses where there is none."""

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
