"""`offload serve` beside other servers, over HTTP as OpenAI has it: `python -m perf.comparison`.

Each server is started for a scenario, asked with the same texts, and ended; then comes the next, so
that they take turns on the machine. Memory is that of its process tree, sampled. Then each is run
again with `LIMIT_SHARE` of the memory that it took: it is told so by its own option, where it has
one, and killed, as a container's limit would, once it holds more than that which no file backs.

With --quick sizes are small, and results go to perf/local.
"""

from __future__ import annotations

import json
import math
import re
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from offload.loading.embedded_package import EMBEDDED_MODEL
from offload.loading.names import load_tokenizer
from offload.system.memory import available_cpus, parse_size
from offload.system.stdlib_text import stdlib_paragraphs
from perf.baselines.servers import (
    PEERS,
    Peer,
    Setting,
    gpu_memory,
    named,
    started_environment,
    use_model,
    version,
)
from perf.results_file import ROOT, Run, read_results, script_options

LIMIT_SHARE = 0.6
ROOM_TOKENS = 64  # in the context, for a text that another tokenizer reads as a few tokens more
START_SECONDS, ANSWER_SECONDS = 1200.0, 3600.0  # vLLM compiles when it starts
SAMPLE_SECONDS = 0.05
NEXT_QUESTION_TOKENS = 64


@dataclass(frozen=True)
class Scenario:
    """What a server is asked.

    Attributes:
        clients: that ask at the same time.
        prompt_tokens, new_tokens: of each request.
        turns: of each client's conversation; other clients' come between them.
        together: conversations are asked at the same time, too.
    """

    name: str
    prompt_tokens: int
    new_tokens: int
    clients: int = 1
    turns: int = 1
    together: bool = False

    @property
    def context(self) -> int:
        """Tokens of the longest request with its answer."""
        more = (self.turns - 1) * (self.new_tokens + NEXT_QUESTION_TOKENS)
        return self.prompt_tokens + self.new_tokens + more + ROOM_TOKENS

    @property
    def at_once(self) -> int:
        """Requests at the same time."""
        return self.clients if self.together or self.turns == 1 else 1


ONE = [Scenario("one client", n, 64) for n in (512, 7168, 28672)]
CLIENTS = Scenario("clients", 2048, 64, clients=8)
CONVERSATIONS = [Scenario("conversations", n, 32, clients=4, turns=2) for n in (7168, 24576)]
SCENARIOS = [*ONE, CLIENTS, *CONVERSATIONS]
ON_GPU = [
    Scenario("one client", 131072, 64),
    Scenario("conversations", 32768, 64, clients=24, turns=2, together=True),
]
LIMITED = [ONE[-1], CLIENTS, CONVERSATIONS[-1]]
QUICK_SCENARIOS = [
    Scenario("one client", 256, 16),
    Scenario("clients", 128, 8, clients=2),
    Scenario("conversations", 256, 8, clients=2, turns=2),
]


@dataclass
class Answer:
    """One request's: when its first token came, and how fast the others did.

    Attributes:
        tokens: as its server counts them, or else as they are in its text.
    """

    ttft_s: float
    seconds: float
    text: str
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """After the first; 0 where there is no other."""
        span = self.seconds - self.ttft_s
        return (self.tokens - 1) / span if self.tokens > 1 and span > 0 else 0.0


@dataclass
class Memory:
    """Bytes of a process tree, and of the GPU: now, and the most that was seen.

    Attributes:
        gpu: of all processes; it takes a while to ask, so it is seen less often.
        private: anonymous and shared memory that no file backs, which cannot be given back.
    """

    rss: int = 0
    pss: int = 0
    private: int = 0
    gpu: bool = False
    peak: dict[str, int] = field(default_factory=dict)

    def sample(self, root: psutil.Process) -> None:
        """Look at all processes of the tree."""
        total = {"rss": 0, "pss": 0, "private": 0}
        with suppress(psutil.Error):
            for process in [root, *root.children(recursive=True)]:
                for name, value in _memory_of(process.pid).items():
                    total[name] += value
        self.rss, self.pss, self.private = total["rss"], total["pss"], total["private"]
        if self.gpu:
            total["gpu"] = gpu_memory("used")
        self.peak = {name: max(x, self.peak.get(name, 0)) for name, x in total.items()}


def _memory_of(pid: int) -> dict[str, int]:
    """Of one process; nothing where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()[1:]
    except OSError:
        return {}
    found = {name: int(rest.split()[0]) << 10 for name, rest in (x.split(":") for x in lines)}
    private = found["Pss_Anon"] + found["Pss_Shmem"]
    return {"rss": found["Rss"], "pss": found["Pss"], "private": private}


class ServerEnded(Exception):
    """A server that did not start, or is not there any more; says why."""


class RunningServer:
    """A peer's process; `watch` samples it, and kills it beyond its limit."""

    def __init__(self, peer: Peer, setting: Setting, limit_bytes: int | None) -> None:
        self.peer, self.limit_bytes, self.killed = peer, limit_bytes, False
        self.memory = Memory(gpu=setting.gpu_bytes is not None)
        self.log = setting.folder / "log.txt"
        self.url = f"http://127.0.0.1:{setting.port}"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                peer.command(setting),
                env=started_environment(peer, setting),
                cwd=setting.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._root = psutil.Process(self.process.pid)
        self._stop = threading.Event()
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    def _watch(self) -> None:
        pause = SAMPLE_SECONDS
        while not self._stop.wait(pause):
            start = time.perf_counter()
            self.memory.sample(self._root)
            pause = max(SAMPLE_SECONDS, 20 * (time.perf_counter() - start))  # 5 % of a CPU
            if self.limit_bytes is not None and self.memory.private > self.limit_bytes:
                self.killed = True
                self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        """To its tree, whatever groups it has made."""
        with suppress(psutil.Error):
            for process in [*self._root.children(recursive=True), self._root]:
                with suppress(psutil.Error):
                    process.send_signal(number)

    def wait_ready(self) -> str:
        """Until it can be asked; returns what requests call its model.

        Raises:
            ServerEnded: it has ended, or `START_SECONDS` have passed.
        """
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise ServerEnded(self.why())
            with suppress(httpx.HTTPError, LookupError, ValueError):
                answer = httpx.get(self.url + self.peer.ready, timeout=5)
                if answer.status_code == 200:
                    return self.peer.served_name(answer.json())
            time.sleep(0.2)
        raise ServerEnded(f"not ready after {START_SECONDS:.0f} s; {self.why()}")

    def why(self) -> str:
        """What it said last, or that it was killed."""
        if self.killed:
            return "killed: it held more than the limit"
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        errors = [x for x in lines if re.search(r"error|exceed|not enough|larger than", x, re.I)]
        return _short((errors or lines or ["it said nothing"])[-1])

    def end(self) -> None:
        """End its tree and wait for it."""
        tree = [self._root]
        with suppress(psutil.Error):
            tree += self._root.children(recursive=True)
        self._stop.set()
        self._watching.join()
        self._signal(signal.SIGTERM)
        _, left = psutil.wait_procs(tree, timeout=20)
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        self.process.wait(timeout=20)


def _short(text: str) -> str:
    """A line without paths of this machine."""
    text = text.replace(str(ROOT), ".").replace(str(Path.home()), "~")
    return re.sub(r"\x1b\[[0-9;]*m|/tmp/\S+", "", text).strip()[:240]


@contextmanager
def running(peer: Peer, setting: Setting, limit_bytes: int | None) -> Iterator[RunningServer]:
    """A server that is ended in any case."""
    server = RunningServer(peer, setting, limit_bytes)
    try:
        yield server
    finally:
        server.end()


@dataclass(frozen=True)
class Refusal:
    """An answer of another status, or none."""

    said: str


def ask(
    server: RunningServer, model: str, prompt: str, new_tokens: int, session: str | None = None
) -> Answer | Refusal:
    """One completion, streamed and greedy."""
    peer = server.peer
    body = {"model": model, "prompt": prompt, "max_tokens": new_tokens, "temperature": 0}
    body |= {"stream": True, **peer.fields}
    if session is not None and peer.session_field:
        body[peer.session_field] = session
    start, first, text, tokens = time.perf_counter(), 0.0, [], 0
    url = f"{server.url}/v1/completions"
    try:
        with httpx.stream("POST", url, json=body, timeout=ANSWER_SECONDS) as response:
            if response.status_code != 200:
                return Refusal(_short(f"{response.status_code}: {response.read().decode()}"))
            for line in response.iter_lines():
                if not line.startswith("data:") or line.endswith("[DONE]"):
                    continue
                said = json.loads(line.removeprefix("data:"))
                if "error" in said:
                    return Refusal(_short(json.dumps(said["error"])))
                tokens = (said.get("usage") or {}).get("completion_tokens", tokens)
                if piece := "".join(choice.get("text") or "" for choice in said["choices"]):
                    first = first or time.perf_counter()
                    last = time.perf_counter()
                    text.append(piece)
    except httpx.HTTPError as error:
        return Refusal(_short(server.why() if server.killed else f"{type(error).__name__} {error}"))
    if not text:
        return Refusal("an answer without text")
    return Answer(first - start, last - start, "".join(text), tokens)


class Texts:
    """Real text by length, each of another place; the same for every server of a round."""

    def __init__(self, model: str = EMBEDDED_MODEL) -> None:
        self._tokenizer = load_tokenizer(model)
        self._ids = self._tokenizer("\n\n".join(stdlib_paragraphs()), verbose=False)["input_ids"]

    def text(self, place: int, num_tokens: int) -> str:
        """`num_tokens` tokens of the place-th part of the text."""
        ids = self._ids * (1 + num_tokens // len(self._ids))
        start = place * 7919 % (len(ids) - num_tokens)
        return str(self._tokenizer.decode(ids[start : start + num_tokens]))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokenizer(text)["input_ids"])


def requests(
    scenario: Scenario, texts: Texts, place: int, one: Callable[[int, str], Answer | Refusal]
) -> list[list[Answer | Refusal]]:
    """All answers of a scenario, by turn.

    Args:
        place: the first place of its texts.
        one: asks a client's prompt.
    """
    prompts = [texts.text(place + i, scenario.prompt_tokens) for i in range(scenario.clients)]
    answers: list[list[Answer | Refusal]] = []
    for turn in range(scenario.turns):
        with ThreadPoolExecutor(scenario.at_once) as pool:
            answers.append(list(pool.map(one, range(scenario.clients), prompts)))
        question = texts.text(place + 100 + turn, NEXT_QUESTION_TOKENS)
        said = [x.text if isinstance(x, Answer) else "" for x in answers[-1]]
        prompts = [f"{x}{answer}\n\n{question}" for x, answer in zip(prompts, said, strict=True)]
    for answer in (x for of_turn in answers for x in of_turn if isinstance(x, Answer)):
        answer.tokens = answer.tokens or texts.count(answer.text)
    return answers


def measure(
    peer: Peer,
    scenario: Scenario,
    texts: Texts,
    *,
    place: int,
    threads: int,
    limit: Limit | None,
    gpu_bytes: int | None = None,
) -> dict[str, Any]:
    """A row of the results: one server, started for one scenario."""
    row: dict[str, Any] = {"peer": peer.name, **asdict(scenario), "scenario": scenario.name}
    del row["name"]
    row |= {"limit_bytes": limit.bytes if limit else None, "gpu_bytes": gpu_bytes}
    with tempfile.TemporaryDirectory(prefix="offload-comparison-") as folder:
        setting = Setting(
            port=_free_port(),
            threads=threads,
            context=scenario.context,
            folder=Path(folder),
            sequences=scenario.at_once,
            kept=scenario.clients if scenario.turns > 1 else 0,
            memory_bytes=limit.told(peer) if limit else None,
            gpu_bytes=gpu_bytes,
        )
        row["told_bytes"] = setting.memory_bytes
        with running(peer, setting, limit.bytes if limit else None) as server:
            try:
                model = server.wait_ready()
                warm = ask(server, model, texts.text(place + 50, 64), 4)
                if isinstance(warm, Refusal):
                    raise ServerEnded(warm.said)
            except ServerEnded as error:
                return row | {"outcome": "does not start", "said": str(error), **_peaks(server)}
            row["idle_private_bytes"] = server.memory.private

            def one(client: int, prompt: str) -> Answer | Refusal:
                session = f"conversation-{client}" if scenario.turns > 1 else None
                return ask(server, model, prompt, scenario.new_tokens, session)

            start = time.perf_counter()
            answers = requests(scenario, texts, place, one)
            row["seconds"] = time.perf_counter() - start
            died = server.killed or server.process.poll() is not None
            return row | _summary(answers, died) | _peaks(server)


def _peaks(server: RunningServer) -> dict[str, int]:
    return {f"peak_{name}_bytes": value for name, value in server.memory.peak.items()}


def _summary(answers: Sequence[Sequence[Answer | Refusal]], died: bool) -> dict[str, Any]:
    """What came of all requests; times are medians, by turn."""
    given = [x for of_turn in answers for x in of_turn if isinstance(x, Answer)]
    refused = [x.said for of_turn in answers for x in of_turn if isinstance(x, Refusal)]
    outcome = "dies" if died else "answers" if not refused else "refuses"
    by_turn = [[x for x in of_turn if isinstance(x, Answer)] for of_turn in answers]
    speeds = [x.tokens_per_second for x in given]
    return {
        "outcome": outcome,
        "said": refused[0] if refused else "",
        "answered": len(given),
        "refused": len(refused),
        "tokens": sum(x.tokens for x in given),
        "ttft_s": [statistics.median(x.ttft_s for x in of) if of else None for of in by_turn],
        "ttft_max_s": [max((x.ttft_s for x in of), default=None) for of in by_turn],
        "tokens_per_second": statistics.median(speeds) if speeds else None,
    }


@dataclass(frozen=True)
class Limit:
    """`LIMIT_SHARE` of what a server took when it had no limit.

    Attributes:
        bytes: of its process tree.
        besides_bytes: what it had besides weights and KV cache when it was idle.
    """

    bytes: int
    besides_bytes: int

    @classmethod
    def of(cls, row: dict[str, Any], weights_bytes: int) -> Limit:
        """From the row without a limit."""
        besides = max(0, row["idle_private_bytes"] - weights_bytes)
        return cls(math.floor(LIMIT_SHARE * row["peak_private_bytes"]), besides)

    def told(self, peer: Peer) -> int | None:
        """What is left for weights and KV cache; None where the peer has no option for it."""
        return max(1 << 20, self.bytes - self.besides_bytes) if peer.memory_option else None


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = script_options(__doc__, "comparison")
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="+", metavar="NAME", help="; ".join(x.name for x in PEERS))
    parser.add_argument("--scenarios", nargs="+", help="names; default: all")
    parser.add_argument("--prompt-tokens", type=int, nargs="+", help="of scenarios; default: all")
    parser.add_argument("--unlimited", action="store_true", help="no run with less memory")
    parser.add_argument("--go-on", action="store_true", help="keep what others were measured at")
    parser.add_argument("--threads", type=int, default=available_cpus())
    gpu = "run scenarios of a GPU, with so much of its memory for a server, such as 24GiB"
    parser.add_argument("--gpu-memory", type=parse_size, metavar="SIZE", help=gpu)
    parser.add_argument("--model", help="a folder, for the peers that read one")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers end with this process
    if options.quick:
        options.rounds, options.output = 1, options.output or ROOT / "perf" / "local"
    run, texts = Run(options), Texts(options.model or EMBEDDED_MODEL)
    peers = [peer for peer in named(options.peers) if peer.reads_folder or not options.model]
    scenarios = QUICK_SCENARIOS if options.quick else SCENARIOS
    if options.gpu_memory is not None:
        scenarios, options.unlimited = ON_GPU, True
    if options.model:
        use_model(options.model)
    limited = QUICK_SCENARIOS if options.quick else LIMITED
    if options.scenarios:
        scenarios = [x for x in scenarios if x.name in options.scenarios]
    if options.prompt_tokens:
        scenarios = [x for x in scenarios if x.prompt_tokens in options.prompt_tokens]
    settings = run.named("rounds", "threads", "quick") | {
        "model": Path(options.model).name if options.model else EMBEDDED_MODEL,
        "limit_share": LIMIT_SHARE,
        "versions": {peer.name: version(peer) for peer in (PEERS if options.go_on else peers)},
    }
    rows: list[dict[str, Any]] = []
    before = (read_results(options.name) or {"rows": []})["rows"] if options.go_on else []

    def add(peer: Peer, scenario: Scenario, place: int, limit: Limit | None) -> None:
        given = {"place": place, "threads": options.threads, "gpu_bytes": options.gpu_memory}
        row = measure(peer, scenario, texts, **given, limit=limit)
        rows.append(row)
        run.say(_line(row))
        again = {_key(x) for x in rows}
        run.write(settings, [*(x for x in before if _key(x) not in again), *rows])

    present = [peer for peer in peers if version(peer)]
    for index in range(options.rounds):
        order = present[index % len(present) :] + present[: index % len(present)]
        for scenario in scenarios:
            for peer in order:
                if options.model or scenario.context <= peer.positions:
                    add(peer, scenario, 1000 * index, None)
    for scenario in (x for x in limited if x in scenarios and not options.unlimited):
        for peer in present:
            free = [x for x in [*rows, *before] if x["peer"] == peer.name and _is_of(x, scenario)]
            if answered := [x for x in free if x["outcome"] == "answers"]:
                add(peer, scenario, 0, Limit.of(answered[0], peer.weights_bytes()))


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What was measured."""
    limited = row["limit_bytes"] is None, row.get("gpu_bytes")
    return row["peer"], row["scenario"], row["prompt_tokens"], *limited


def _is_of(row: dict[str, Any], scenario: Scenario) -> bool:
    return (row["scenario"], row["prompt_tokens"]) == (scenario.name, scenario.prompt_tokens)


def _line(row: dict[str, Any]) -> str:
    """A row for who waits."""
    limit = f", limit {row['limit_bytes'] / 2**20:.0f} MiB" if row["limit_bytes"] else ""
    peak = row.get("peak_pss_bytes", 0) / 2**20
    times = [f"{x:.2f} s" for x in row.get("ttft_s", ()) if x is not None]
    speed = row.get("tokens_per_second")
    return (
        f"{row['peer']}, {row['scenario']} of {row['prompt_tokens']:,}{limit}: {row['outcome']} "
        f"{row['said']} first token {', '.join(times)}; "
        f"{f'{speed:.1f} tokens/s' if speed else ''}; PSS {peak:.0f} MiB"
    )


if __name__ == "__main__":
    main()
