"""What Prometheus is told: the engine's counts, read when it asks, and times of answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Histogram, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from starlette.responses import Response

from cpu_ops.native import isa_name
from offload.engine.engine import Engine
from offload.engine.sessions import Sessions
from offload.system.version import __version__

_LOADED = "offload_model_loaded", "1 when requests are answered."
# From a session's prompt on a GPU to a long one on a slow CPU.
_SECONDS = (
    *(0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
    *(60, 120, 300, 600, 1200, 1800, 3600),
)
_GAP_SECONDS = (
    *(0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75),
    *(1, 2.5, 5, 10, 30),
)


class _OfEngine(Collector):
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client calls it."""
        stats, store = self._engine.stats, self._engine.model.kv_store
        requests = CounterMetricFamily("offload_requests", "Requests by their end.", labels=["end"])
        for end in ("finished", "failed", "cancelled"):
            requests.add_metric([end], getattr(stats, end))
        yield requests
        if self._engine.sessions is not None:
            yield from _of_sessions(self._engine.sessions)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens that were read.", stats.prompt_tokens),
            (
                "cached_tokens",
                "Prompt tokens that were there.",
                stats.cached_tokens,
            ),
            ("answer_tokens", "Tokens that were chosen.", stats.answer_tokens),
            ("corrected_tokens", "Decoded tokens that were read again.", stats.corrected_tokens),
            ("decode_steps", "Steps, each of all running requests.", stats.decode_steps),
            ("read_seconds", "Time spent on prompts.", stats.read_seconds),
            ("decode_seconds", "Time spent on steps.", stats.decode_seconds),
        ):
            yield CounterMetricFamily(f"offload_{name}", text, value=value)
        for name, text, value in (
            ("requests_running", "Requests that are read or decoded.", self._engine.num_running),
            ("requests_waiting", "Requests that wait.", self._engine.num_waiting),
            ("kv_host_bytes", "Bytes of KV cache in host memory.", store.host_bytes_used),
            ("kv_host_budget_bytes", "Bytes it may take.", store.host_budget_bytes),
        ):
            yield GaugeMetricFamily(f"offload_{name}", text, value=value)


def _of_sessions(sessions: Sessions) -> Iterator[Metric]:
    stats = sessions.stats
    hits = CounterMetricFamily(
        "offload_session_hits", "Requests that went on from a session.", labels=["where"]
    )
    hits.add_metric(["memory"], stats.memory_hits)
    hits.add_metric(["disk"], stats.disk_hits)
    yield hits
    for name, text, value in (
        ("session_misses", "Requests whose session was not there, or did not fit.", stats.misses),
        ("sessions_saved", "Session files that were written.", stats.saved),
        ("sessions_spilled", "Sessions that left memory for the disk.", stats.spilled),
    ):
        yield CounterMetricFamily(f"offload_{name}", text, value=value)
    text = "Bytes of idle sessions in host memory."
    yield GaugeMetricFamily("offload_session_host_bytes", text, value=sessions.host_bytes)


class _Build(Collector):
    """What is served, and by what."""

    def __init__(self, engine: Engine) -> None:
        model = engine.model
        self._facts = {
            "version": __version__,
            "policy": model.policy.name,
            "isa": isa_name(),
            "device": model.device.type,
            "dtype": str(model.dtype).removeprefix("torch."),
        }

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client calls it."""
        yield InfoMetricFamily("offload_build", "What is served, and by what.", value=self._facts)


class _OfModel(Collector):
    """What another registry has, with the model's name, as the metrics of vLLM have it."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry, self._labels = registry, {"model_name": model_name}

    def collect(self) -> Iterator[Metric]:
        """As prometheus_client calls it."""
        yield GaugeMetricFamily(*_LOADED, value=1)
        for metric in self._registry.collect():
            metric.samples = [
                sample._replace(labels={**sample.labels, **self._labels})
                for sample in metric.samples
            ]
            yield metric


class Metrics:
    """The metrics of one server.

    Attributes:
        queued: seconds that a choice waits before its prompt is read.
        first_token: seconds from a request's acceptance to its first token.
        inter_token: seconds from a token of a choice to its next.
        answer: seconds to its last.
    """

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._labelled = CollectorRegistry()
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        self.registry.register(_Build(engine))
        self._labelled.register(_OfModel(self.registry, model_name))

        def seconds(name: str, about: str, buckets: Sequence[float] = _SECONDS) -> Histogram:
            name = f"offload_{name}_seconds"
            return Histogram(name, about, buckets=buckets, registry=self.registry)

        self.queued = seconds("queued", "Time that a choice waits before its prompt is read.")
        self.first_token = seconds("first_token", "Time to the first token of a choice.")
        self.inter_token = seconds(
            "inter_token", "Time from a token of a choice to its next.", _GAP_SECONDS
        )
        self.answer = seconds("answer", "Time to the last token of a choice.")

    def response(self) -> Response:
        """The text that Prometheus reads."""
        return _response(self._labelled)


class _WhileLoading(Collector):
    def collect(self) -> Iterator[Metric]:
        """As prometheus_client calls it."""
        yield GaugeMetricFamily(*_LOADED, value=0)


def while_loading() -> Response:
    """What there is to tell without an engine."""
    registry = CollectorRegistry()
    registry.register(_WhileLoading())
    return _response(registry)


def _response(registry: CollectorRegistry) -> Response:
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
