"""`offload env`: what the runtime sees of this machine."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from offload.cli.console import print_json, running, stdout


def env(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, CPU, instruction set, memory limits, GPUs and the cache folder.

    Include the output in bug reports. [bold]OFFLOAD_ISA[/bold] forces an instruction set and
    [bold]OFFLOAD_CACHE[/bold] moves the cache folder:

        OFFLOAD_ISA=avx2 offload env
    """
    with running():
        from offload.system.cache_folder import cache_folder
        from offload.system.machine import describe_machine

        facts = describe_machine() | {"cache_folder": str(cache_folder())}
    if as_json:
        print_json(facts)
    else:
        _print_table(facts)


def _print_table(facts: dict[str, Any]) -> None:
    from rich.table import Table

    from offload.system.memory import format_bytes

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    versions = {name: found or "not installed" for name, found in facts["versions"].items()}
    forced = " (forced by OFFLOAD_ISA)" if facts["isa_forced"] else ""
    rows = versions | {
        "platform": facts["platform"],
        "CPU": facts["cpu"],
        "CPUs": f"{facts['cpus_usable']} usable of {facts['cpus_present']}",
        "last-level cache": format_bytes(facts["last_level_cache_bytes"]),
        "instruction set": f"{facts['isa']}{forced}",
        "available here": ", ".join(facts["isas_available"]),
        "in this build": ", ".join(facts["isas_known"]),
        "memory": facts["memory_explained"],
        "slow here": "\n".join(facts["slow_here"]) or "nothing that is known",
        "huge pages": facts["transparent_hugepages"],
        "GPUs": ", ".join(facts["gpus"]) or "none that torch can use",
        "decode backend": ", ".join(facts["gpu_backends"]) or "native kernels, on the CPU",
        "NVIDIA driver": facts["nvidia_driver"] or "not loaded",
        "cache folder": facts["cache_folder"],
    }
    for name, value in rows.items():
        table.add_row(name, value)
    stdout().print(table)
