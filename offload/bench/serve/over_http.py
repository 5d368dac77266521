"""Loads on servers that answer over HTTP as OpenAI's do; aiperf sends them.

aiperf is a program of its own environment (`make load-generator`). It gets the prompts and the
times of `Load`, and says of each request when which part of its answer came.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from offload.bench.eval.perplexity import text_tokens
from offload.bench.serve.load import Answer, Load, Prompts
from offload.bench.serve.measure import OnRequest, Row, described, ignore, summary
from offload.bench.serve.pace import SHORT_TOKENS
from offload.loading.names import load_tokenizer, resolve_folder

_IN_CHECKOUT = Path(__file__).parents[3] / ".venv-load" / "bin" / "aiperf"
_SERVER_SECONDS = 600.0  # for the first request, which may have the model loaded
# What has a server go on where the model would end its answer. One that refuses a field gets the
# next: transformers' does not know ignore_eos, others know neither.
_NO_END: tuple[dict[str, Any], ...] = (
    {"ignore_eos": True},
    {"generation_config": json.dumps({"eos_token_id": -1})},
    {},
)


def find_generator(given: Path | None = None) -> str:
    """aiperf: as given, of `make load-generator`, or on the PATH.

    Raises:
        FileNotFoundError: none there; says how to get it.
    """
    for candidate in [given] if given is not None else [_IN_CHECKOUT, Path("aiperf")]:
        if found := shutil.which(str(candidate)):
            return found
    where = f"at {given}" if given is not None else "in .venv-load or on the PATH"
    raise FileNotFoundError(
        f"no load generator {where}: run make load-generator in a checkout, or install aiperf into "
        "an environment of its own, and give --generator .../bin/aiperf"
    )


def served_name(url: str, given: str | None = None) -> str:
    """The name of the model that a server answers with: the only one it lists, or else `given`.

    Raises:
        ConnectionError: the server does not answer.
        ValueError: it lists none or several models, and no name is given.
    """
    try:
        names = [model["id"] for model in _asked(f"{url}/v1/models")["data"]]
    except HTTPError:
        if given is None:
            raise
        names = []  # transformers' fails where nothing was downloaded yet
    if len(names) == 1:
        return str(names[0])
    if given is None:
        listed = f"{len(names)} models, {', '.join(names)}" if names else "no models"
        raise ValueError(f"{url} lists {listed}; say which with --served-model-name")
    return given


def measure_urls(
    generator: str,
    urls: Sequence[str],
    loads: Sequence[Load],
    text: str,
    model: str | None = None,
    on_request: OnRequest = ignore,
) -> Iterator[Row]:
    """A row for each load on each server. Servers keep prompts, so each load has texts of its own.

    Args:
        generator: `find_generator`.
        urls: without /v1.
        text: what prompts are pieces of.
        model: whose tokenizer counts tokens, and who is asked for where a server lists none or
            several; by default the one that the first server lists.

    Raises:
        ConnectionError: a server or the generator failed.
        ValueError, FileNotFoundError: as `served_name`, `load_tokenizer` and `Prompts`.
    """
    names = {url: served_name(url, model) for url in urls}
    tokenizer_name = model or names[urls[0]]
    tokenizer = load_tokenizer(tokenizer_name)
    beginning, tokens = text_tokens(text, tokenizer)
    loads = [replace(load, seed=load.seed + 1000 * i) for i, load in enumerate(loads)]
    prompts = [Prompts((beginning, tokens), load) for load in loads]

    def as_text(prompt: Sequence[int]) -> str:
        decoded: str = tokenizer.decode(prompt[len(beginning) :])
        return decoded

    for url, name in names.items():
        about = {"engine": url.partition("://")[2], "model": name, "policy": None, "dtype": None}
        unread = prompts[0].of(-1, 0)[-SHORT_TOKENS:]
        short = {"model": name, "prompt": as_text(unread)}
        fields = _warm_up(url, short | {"max_tokens": 4, "temperature": 0})
        for load, of_load in zip(loads, prompts, strict=True):
            with TemporaryDirectory() as folder:
                requests = Path(folder) / "requests.jsonl"
                lines = [
                    {"text": as_text(of_load.of(client, index)), "timestamp": 1e3 * at}
                    for at, client, index in _sends(load)
                ]
                body = {"temperature": load.temperature} | fields
                extra = {"output_length": load.answer_tokens, "extra": body}
                requests.write_text("".join(f"{json.dumps(line | extra)}\n" for line in lines))
                timing = ["--fixed-schedule", "--fixed-schedule-auto-offset"]
                if load.rate is None:
                    timing = ["--no-fixed-schedule", f"--concurrency={load.clients}"]
                    timing += [f"--request-count={load.num_requests}"]
                command = [
                    *(generator, "profile", "--endpoint-type=completions", "--streaming"),
                    *(f"--url={url}", f"--model={name}", f"--input-file={requests}"),
                    *("--custom-dataset-type=single_turn", *timing, "--ui=none"),
                    f"--tokenizer={resolve_folder(tokenizer_name)}",
                    *(f"--artifact-dir={folder}", "--no-gpu-telemetry", "--no-server-metrics"),
                ]
                records = _records(command, Path(folder)) if lines else []
            for _ in records:
                on_request(str(about["engine"]))
            answers = [_answer(record) for record in records]
            yield about | described(load) | summary(answers, load) | _costs(records)


def _sends(load: Load) -> list[tuple[float, int, int]]:
    """As `Load.first_sends`, but all of them, in the order in which clients would take turns."""
    if load.rate is not None:
        return load.first_sends()
    return [(0.0, client, i) for i in range(load.requests) for client in range(load.clients)]


def _warm_up(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """One short request, which is not counted; the fields of `_NO_END` that the server takes."""
    for fields in _NO_END[:-1]:
        try:
            _asked(f"{url}/v1/completions", {**body, **fields})
        except HTTPError as error:
            if error.code not in (400, 422):
                raise
        else:
            return fields
    _asked(f"{url}/v1/completions", body)
    return _NO_END[-1]


def _asked(url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_SERVER_SECONDS) as response:
            return json.load(response)
    except HTTPError as error:
        with error:
            said = error.read(500).decode(errors="replace")
        raise HTTPError(url, error.code, f"{url}: {said}", error.headers, None) from None
    except OSError as error:
        raise ConnectionError(f"{url} does not answer: {getattr(error, 'reason', error)}") from None


def _records(command: Sequence[str], folder: Path) -> list[dict[str, Any]]:
    # Where these are set, aiperf 0.13 takes a tokenizer's folder for a name on the hub.
    offline = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in offline}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    path = folder / "profile_export.jsonl"
    if not path.exists() or not path.stat().st_size:
        said = (ran.stderr or ran.stdout).strip()[-2000:]
        raise ConnectionError(f"{command[0]} ended with {ran.returncode} and no records: {said}")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _answer(record: Mapping[str, Any]) -> Answer:
    """Tokens that the server counts beyond the parts of an answer came with the last part."""
    metrics, error = _values(record), record.get("error")
    sent = record["metadata"]["request_start_ns"] / 1e9
    answer = Answer(_counted(metrics, "usage_prompt_tokens", "input_sequence_length"), sent)
    if error is not None:
        answer.error = f"{error.get('code') or error.get('type')} {error.get('message')}"
        answer.is_refused = error.get("code") in (429, 503)
    if "time_to_first_token" in metrics:
        steps = [metrics["time_to_first_token"], *metrics.get("inter_chunk_latency", [])]
        times = [sent + ms / 1e3 for ms in accumulate(steps)]
        count = _counted(metrics, "usage_completion_tokens", "output_sequence_length")
        answer.times = [*times[:count], *[times[-1]] * (count - len(times))]
    return answer


def _counted(metrics: Mapping[str, Any], by_server: str, by_tokenizer: str) -> int:
    return int(metrics.get(by_server, metrics.get(by_tokenizer, 0)))


def _costs(records: Sequence[Mapping[str, Any]]) -> Row:
    """As `Server.costs`, of which a server says what its prompts had cached, or nothing."""
    cached = [_values(record).get("usage_prompt_cache_read_tokens") for record in records]
    said = [int(count) for count in cached if count is not None]
    return {"cached_tokens": sum(said) if said else None, "own_share": None, "kv_host_bytes": None}


def _values(record: Mapping[str, Any]) -> dict[str, Any]:
    return {name: metric["value"] for name, metric in record.get("metrics", {}).items()}
