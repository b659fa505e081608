"""holdfast requests: idempotency records, without their keys and bodies."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from holdfast.cli import output
from holdfast.cli.command_group import command_group
from holdfast.cli.options import JsonOption, LimitOption, Where, spread
from holdfast.cli.selection import moment

app = command_group("Requests with an idempotency key: was it used, and how did it end?")


@app.command("list")
@spread
def list_(
    where: Where,
    scope: Annotated[str | None, typer.Option("--scope", metavar="TEXT", help="Of this scope.")] = None,
    state: Annotated[str | None, typer.Option("--state", metavar="STATE", help="started, completed or failed.")] = None,
    since: Annotated[
        str | None, typer.Option("--since", metavar="TIME", help="Since: 2h, 7d, or 2026-01-31T08:00 (UTC).")
    ] = None,
    until: Annotated[str | None, typer.Option("--until", metavar="TIME", help="Before this time.")] = None,
    before: Annotated[
        str | None, typer.Option("--before", metavar="CURSOR", help="Go on where the page before ended.")
    ] = None,
    limit: LimitOption = 50,
    as_json: JsonOption = False,
) -> None:
    """List requests with an idempotency key, those that expire last first. Times are UTC."""
    filters: dict[str, Any] = {
        "scope": scope,
        "state": state,
        "since": moment("--since", since),
        "until": moment("--until", until),
    }
    found = where.run(lambda operator: operator.requests.page(**filters, before=before, limit=limit))
    if as_json:
        output.print_json(found)
        return
    output.print_table(
        ("scope", "key", "state", "status", "created", "expires", "body"),
        [
            (r.scope, r.key_hint, r.state, r.status_code, r.created_at, r.expires_at, _body(r.body_bytes))
            for r in found.requests
        ],
    )
    if found.next is not None:
        output.print_line(f"{found.examined:,} examined; there may be more: --before '{found.next}'", "dim")


@app.command("show")
@spread
def show(
    where: Where,
    scope: Annotated[str, typer.Argument(metavar="SCOPE", help="Whose key it is, as in requests list.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key that the client sent.")],
    as_json: JsonOption = False,
) -> None:
    """Show whether a key was used in a scope, and how the request ended. Times are UTC."""
    found = where.run(lambda operator: operator.requests.detail(scope, key))
    if as_json:
        output.print_json(found)
        return
    output.print_line(f"{found.scope} {found.key_hint}", "bold")
    output.print_facts(
        (
            ("state", found.state),
            ("status", found.status_code),
            ("body", _body(found.body_bytes)),
            ("created", found.created_at),
            ("expires", found.expires_at),
        )
    )
    if found.body_omitted:
        output.print_line("its body was too large to be kept", "dim")


def _body(size: int | None) -> str | None:
    return None if size is None else f"{size:,} bytes"
