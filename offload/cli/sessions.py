"""`offload sessions`: what a folder of saved sessions has."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.commands import add_command, command_group
from offload.cli.console import make_table, print_json, running, stdout

app = command_group(help="Look at saved sessions, copy and remove them.")

Folder = Annotated[Path, typer.Argument(help="Of the sessions.", exists=True, file_okay=False)]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="Of the session.")]


def list_sessions(
    folder: Folder, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Show the sessions of a folder, the one that was used last at the end.

    Only the beginning of each file is read.
    """
    with running():
        from offload.engine.session_folder import SessionFolder
        from offload.system.errors import SessionMiss
        from offload.system.memory import format_bytes

        found, rows = SessionFolder(folder), list[dict[str, str | int]]()
        for each in found.sessions():
            used = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.used))
            row: dict[str, str | int] = {"id": each.session_id, "bytes": each.num_bytes}
            try:
                row |= {"tokens": found.num_tokens(each.session_id), "used": used}
            except SessionMiss:
                row |= {"tokens": "damaged", "used": used}
            rows.append(row)
        if as_json:
            print_json({"sessions": rows})
            return
        table = make_table(
            ["id", "tokens", "size", "last used"],
            [
                [str(x["id"]), str(x["tokens"]), format_bytes(int(x["bytes"])), str(x["used"])]
                for x in rows
            ],
        )
        stdout().print(table)


def export_session(
    folder: Folder,
    session_id: SessionId,
    to: Annotated[Path, typer.Argument(help="File to write.", metavar="FILE", dir_okay=False)],
) -> None:
    """Copy a session into a file, after its checksums were compared."""
    with running():
        from offload.engine.session_folder import SessionFolder

        SessionFolder(folder).export(session_id, to)


def import_session(
    folder: Folder,
    source: Annotated[Path, typer.Argument(help="That was exported.", metavar="FILE")],
    session_id: SessionId,
) -> None:
    """Copy a file into the folder as a session, after its checksums were compared.

    A server that has the session in memory goes on from there.
    """
    with running():
        from offload.engine.session_folder import SessionFolder

        SessionFolder(folder).import_(source, session_id)


def remove_sessions(
    folder: Folder,
    session_ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Of the sessions.")],
) -> None:
    """Remove sessions from the folder."""
    with running():
        from offload.engine.session_folder import SessionFolder

        found = SessionFolder(folder)
        for session_id in session_ids:
            found.remove(session_id)


add_command(app, list_sessions, name="list")
add_command(app, export_session, name="export")
add_command(app, import_session, name="import")
add_command(app, remove_sessions, name="rm")
