"""`offload serve`: an OpenAI server."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import typer

from offload.cli.console import quiet_transformers, running
from offload.cli.generate import Loading
from offload.cli.options import (
    DEFAULT_MODEL,
    ModelName,
    PolicyChoice,
    Verbose,
    check_name,
    memory_budgets,
)
from offload.policies.registry import make_policy
from offload.system.garbage import importing_torch
from offload.system.installing import missing_extra

logger = logging.getLogger(__name__)

_GENERATION_CONFIGS = ("auto", "none")
_LOG_FORMATS = ("text", "json")
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class Chosen(PolicyChoice):
    """The policy, and how tokens are chosen."""

    panel: ClassVar[str] = "How it runs"
    generation_config: Annotated[
        str,
        typer.Option(
            metavar="auto|none",
            help="Where requests leave out temperature, top_p, top_k, min_p or repetition_penalty: "
            "those of the model's generation config (auto), or OpenAI's (none).",
        ),
    ] = "auto"


@dataclass(frozen=True)
class Load:
    """How much at a time."""

    panel: ClassVar[str] = "How much at a time"
    max_num_seqs: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests that are read and decoded at a time; long ones on a GPU may be fewer.",
        ),
    ] = 32
    max_queued: Annotated[
        int, typer.Option(min=0, help="Requests that wait for these; one more gets a 429.")
    ] = 256
    max_body_bytes: Annotated[int, typer.Option(min=1, help="Of a request's body.")] = 8 * 2**20
    default_max_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Of a chat's answer without max_tokens, as far as the context has room.",
        ),
    ] = None
    max_schema_bytes: Annotated[
        int, typer.Option(min=1, max=2**20, help="Of the schemas and grammars of a request.")
    ] = 64 * 2**10
    max_schema_depth: Annotated[
        int, typer.Option(min=1, help="How deep a request's schemas may nest.")
    ] = 64
    shutdown_seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            help="After SIGTERM answers that have begun have so long to finish, then sessions so "
            "long to be written; prompts that are still read, and new requests, get a 503.",
        ),
    ] = 30.0


@dataclass(frozen=True)
class Kept:
    """Between requests of a session."""

    panel: ClassVar[str] = "What is kept of sessions"
    session_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Requests may name a session (session_id), which is kept here and goes on after "
            "a restart.",
        ),
    ] = None
    session_disk: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help=r"Limit of the folder: 200GiB. \[default: none]"),
    ] = None
    session_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Host memory of idle sessions, within that of the KV cache. "
            r"\[default: half of it]",
        ),
    ] = None

    def sizes(self) -> tuple[int | None, int | None]:
        """Bytes of memory and of disk for sessions.

        Raises:
            ValueError: a size that is none, or without a folder.
        """
        from offload.system.memory import parse_size

        sizes = {"--session-memory": self.session_memory, "--session-disk": self.session_disk}
        for name, size in sizes.items():
            if size is not None and self.session_dir is None:
                raise ValueError(f"{name} needs --session-dir")
        memory, disk = (
            None if size is None else parse_size(int(size) if size.isdecimal() else size, name=name)
            for name, size in sizes.items()
        )
        return memory, disk


@dataclass(frozen=True)
class Listening:
    """Where, and to whom."""

    panel: ClassVar[str] = "Who may ask"
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 is all of them.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is a free one.")] = 8000
    served_model_name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help=r"What requests call the model. \[default: as MODEL]"),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", envvar="OFFLOAD_API_KEY", help="Which requests must bring. Repeatable."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None, typer.Option(metavar="PATH", help="A file of keys, one in a line.")
    ] = None
    public_models: Annotated[
        bool, typer.Option("--public-models", help="/v1/models needs no key.")
    ] = False
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="A web site whose pages may ask. Repeatable."),
    ] = None

    def api_keys(self) -> tuple[str, ...]:
        """From both options.

        Raises:
            ValueError: an empty key, or a file without one.
        """
        keys = [*(self.api_key or [])]
        if self.api_key_file is not None:
            lines = self.api_key_file.read_text("utf-8").split()
            if not lines:
                raise ValueError(f"{self.api_key_file} has no key")
            keys += lines
        if not all(key.strip() for key in keys):
            raise ValueError("an API key is empty")
        return tuple(keys)


LogFormat = Annotated[
    str,
    typer.Option(
        metavar="text|json",
        help="Of the log on stderr: a record is a line of text or a JSON object.",
    ),
]


def serve(
    model: ModelName = DEFAULT_MODEL,
    *,
    chosen: Chosen,
    loading: Loading,
    load: Load,
    kept: Kept,
    listening: Listening,
    log_format: LogFormat = "text",
    verbose: Verbose = False,
) -> None:
    """Answer requests over HTTP as an OpenAI server does, many at a time.

    A chat page is at [bold]/[/bold], and what it counts at [bold]/metrics[/bold]. Ctrl-C or SIGTERM
    ends it when the answers that have begun are finished; a second one ends it at once. The log on
    stderr has one line a request.

    [bold]Examples[/bold]

        offload serve smollm2-135m-instruct

        offload serve ./Qwen3-0.6B --max-memory cpu=32GiB --max-num-seqs 16

    For other machines, with keys from a file:

        offload serve ./Llama-3.1-8B-Instruct --device cuda --host 0.0.0.0
        --api-key-file keys.txt
    """
    with running(verbose=verbose):
        check_name(log_format, _LOG_FORMATS, option="--log-format")
    with running(verbose=verbose, log_format=log_format):
        with importing_torch():
            load_served, access = prepare(
                model,
                chosen=chosen,
                loading=loading,
                load=load,
                kept=kept,
                listening=listening,
                verbose=verbose,
            )
        if not access.api_keys and access.host not in _LOOPBACK:
            logger.warning("everybody who reaches %s may ask", access.host)
        from offload.serve.connections import raise_file_limit
        from offload.serve.server import Server

        raise_file_limit()
        with quiet_transformers(verbose=verbose):
            try:
                Server(load_served, access, logger.info).run()
            finally:
                gc.freeze()  # or the interpreter's end walks all objects several times: seconds


def prepare(
    model: ModelName = DEFAULT_MODEL,
    *,
    chosen: Chosen,
    loading: Loading,
    load: Load,
    kept: Kept,
    listening: Listening,
    verbose: Verbose = False,
) -> tuple[Callable[[], Any], Any]:
    """What loads the model and makes a `Served` of it, and to whom it is served (`Access`)."""
    options = chosen.options()
    check_name(chosen.generation_config, _GENERATION_CONFIGS, option="--generation-config")
    arguments = asdict(loading) | {"max_memory": memory_budgets(loading.max_memory or [])}
    for name in ("tensor_parallel_size", "host_bytes_per_sequence"):
        if arguments[name] not in (None, 1):
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{option} is for one generation at a time; leave it out of a server")
    try:
        from offload.serve.app import Served
        from offload.serve.grammars import SchemaLimits
        from offload.serve.sampling_defaults import sampling_defaults
        from offload.serve.server import Access
    except ModuleNotFoundError as error:
        raise ValueError(missing_extra("serve", "offload serve") or str(error)) from error
    from offload.engine.async_engine import AsyncEngine
    from offload.engine.engine import Engine
    from offload.engine.sessions import Sessions
    from offload.engine.working_memory import WorkingMemory
    from offload.loading.names import load_tokenizer
    from offload.runtime.model import OffloadedModel
    from offload.runtime.row_dtype import lack_of_room, takes_int8
    from offload.system.memory import give_back_free_memory

    folder, sizes = kept.session_dir, kept.sizes()
    access = Access(
        listening.host,
        listening.port,
        listening.api_keys(),
        listening.public_models,
        load.max_body_bytes,
        tuple(listening.cors_origin or ()),
        load.shutdown_seconds,
    )
    policy = make_policy(chosen.policy, **options)

    def load_served() -> Served:
        tokenizer = load_tokenizer(model)
        loaded = OffloadedModel.from_pretrained(model, policy=policy, **arguments)
        reading = WorkingMemory.of(loaded, loaded._offload).of_slice
        lack = lack_of_room(loaded, reading)
        if lack and takes_int8(loaded, loading.kv_dtype):
            logger.info("--kv-dtype auto: int8, as otherwise %s", lack)
            del loaded
            gc.collect()  # its weights leave the memory first
            in_int8 = arguments | {"kv_dtype": "int8"}
            loaded = OffloadedModel.from_pretrained(model, policy=policy, **in_int8)
        is_auto = chosen.generation_config == "auto"
        defaults = sampling_defaults(loaded.generation_config) if is_auto else {}
        engine = Engine(
            loaded,
            tokenizer,
            max_num_seqs=load.max_num_seqs,
            max_queued=load.max_queued,
            sessions=None if folder is None else Sessions(folder, *sizes),
        )
        give_back_free_memory()  # that loading has left
        return Served(
            AsyncEngine(engine),
            listening.served_model_name or model,
            schema_limits=SchemaLimits(load.max_schema_bytes, load.max_schema_depth),
            flush_seconds=load.shutdown_seconds,
            default_max_tokens=load.default_max_tokens,
            sampling_defaults=defaults,
        )

    return load_served, access
