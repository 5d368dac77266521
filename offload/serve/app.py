"""The routes."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse

from offload.engine.async_engine import AsyncEngine
from offload.engine.sampling_params import SamplingParams
from offload.engine.sessions import SessionInUseError, Sessions, check_session_id
from offload.serve import response_items
from offload.serve.answers import Answers, Choice, Job
from offload.serve.chat import Texts
from offload.serve.described import (
    ERRORS,
    ChatAnswer,
    CompletionAnswer,
    Detokenized,
    Health,
    Load,
    ModelCard,
    ModelList,
    Props,
    RemovedSession,
    ResponseAnswer,
    SessionList,
    Tokenized,
    answer_or_stream,
)
from offload.serve.docs_page import docs_page
from offload.serve.errors import ApiError, context_error, install, of_engine
from offload.serve.formats import Chat, Completion, Format
from offload.serve.grammars import Grammars, Mask, SchemaLimits
from offload.serve.metrics import Metrics
from offload.serve.page import add_page
from offload.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)
from offload.serve.request_log import current
from offload.serve.responses import ResponseRequest
from offload.serve.streaming import AnswerStream
from offload.system.version import __version__

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_GRACE_SECONDS = 1.0  # a layer may take so long beyond the time for sessions


@dataclass
class Served:
    """An engine that is served under a name.

    Attributes:
        flush_seconds: in which sessions are written at the end.
        default_max_tokens: of a chat's answer that has no max_tokens; None: as the engine has it.
        schema_limits: of what an answer is to keep to.
        sampling_defaults: by name, where a request has none; others are OpenAI's.
    """

    engine: AsyncEngine
    name: str
    flush_seconds: float = 30.0
    schema_limits: SchemaLimits = field(default_factory=SchemaLimits)
    default_max_tokens: int | None = None
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        model = self.engine.engine.model
        eos = model.generation_config.eos_token_id
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        tokenizer, vocab_size = self.engine.engine.tokenizer, model.config.vocab_size
        self.texts = Texts(tokenizer, vocab_size, ends)
        self._grammars = Grammars(tokenizer, vocab_size, ends, self.schema_limits)
        self.metrics = Metrics(self.engine.engine, self.name)
        self.started = int(time.time())

    @property
    def max_context(self) -> int:
        """Tokens."""
        return self.engine.engine.max_context

    def check_model(self, name: str | None) -> None:
        """Refuse another model's name."""
        if name is not None and name != self.name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist; available: {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def check_number(self, num_prompts: int, n: int) -> None:
        """Refuse what would not fit in an empty queue, either."""
        most = self.engine.engine.max_num_seqs + self.engine.engine.max_queued
        if num_prompts * n > most:
            message = f"{num_prompts} prompts with n={n}: this server takes at most {most} answers"
            raise ApiError(400, f"{message} of a request", param="n")

    def check_context(self, num_tokens: int, body: Sampled) -> None:
        """Refuse a prompt that has no room for its answer."""
        if num_tokens + (body.most_tokens or 1) - 1 > self.max_context:
            raise context_error(num_tokens, body.most_tokens, self.max_context)

    async def answer(
        self, request: Request, body: Sampled, prompts: Sequence[list[int]], form: Format
    ) -> Response:
        """Each prompt `n` times, streamed or not."""
        session_id, params = self._session_id(request, body.session_id), self._params(body)
        if session_id is not None and len(prompts) * len(params) > 1:
            raise ApiError(400, "a session has one answer to one prompt", param="session_id")
        for ids in prompts:
            self.check_context(len(ids), body)
        jobs = [
            Job(ids, self._limited(each, len(ids)), session_id)
            for ids in prompts
            for each in params
        ]
        for constraint in body.constraints():
            matcher = await self._grammars.compile(constraint)
            masks = [Mask(matcher.deep_copy()) for _ in jobs]
            jobs = [
                replace(job, params=replace(job.params, logits_processors=(mask,)))
                for job, mask in zip(jobs, masks, strict=True)
            ]
        answers = await Answers.start(self.engine, jobs, self.metrics)
        ends = self.texts.special | {*body.stop_token_ids}
        choices = [
            Choice(i, ends, body.only_echoes, num_prompt_tokens=len(job.prompt))
            for i, job in enumerate(jobs)
        ]
        record = current()
        record.choices, record.choices_per_prompt = choices, body.n
        if body.stream:
            return AnswerStream(answers, choices, form)
        try:
            await while_connected(request, _collect(answers, choices))
        finally:
            await answers.close()
        return JSONResponse(form.whole(choices))

    async def stop(self, is_forced: Callable[[], bool] = lambda: False) -> bool:
        """What runs is cancelled, and sessions are written; False: not in time, or forced.

        Then a step still runs, or a file is written, in threads that end with the process.
        """
        flush_seconds = 0.0 if self.engine.engine.sessions is None else self.flush_seconds
        until = time.monotonic() + flush_seconds + _GRACE_SECONDS
        thread = threading.Thread(
            target=self.engine.engine.stop, kwargs={"timeout": flush_seconds}, daemon=True
        )
        thread.start()
        while thread.is_alive() and not is_forced() and time.monotonic() < until:
            await asyncio.sleep(0.02)
        if thread.is_alive():
            logger.warning("the engine has not stopped yet; what it does is given up")
        return not thread.is_alive()

    def sessions(self) -> Sessions:
        """Those of the engine, or a 400."""
        sessions = self.engine.engine.sessions
        if sessions is None:
            raise ApiError(
                400,
                "session_id: this server keeps no sessions; start it with --session-dir FOLDER",
                param="session_id",
            )
        return sessions

    def _session_id(self, request: Request, of_body: str | None) -> str | None:
        """By the body or the header."""
        given = {*request.headers.getlist("X-Session-ID"), *([of_body] if of_body else [])}
        if not given:
            return None
        self.sessions()
        if len(given) > 1:
            message = "session_id and the header X-Session-ID differ"
            raise ApiError(400, message, param="session_id")
        return _checked_id(given.pop())

    def _params(self, body: Sampled) -> list[SamplingParams]:
        try:
            return [body.sampling(number) for number in range(body.n)]
        except ValueError as error:
            raise of_engine(error) from error

    def _limited(self, params: SamplingParams, num_prompt_tokens: int) -> SamplingParams:
        if params.max_tokens is not None or self.default_max_tokens is None:
            return params
        room = self.max_context - num_prompt_tokens + 1
        most = max(min(self.default_max_tokens, room), params.min_tokens)
        return replace(params, max_tokens=most)


def _checked_id(session_id: str) -> str:
    try:
        return check_session_id(session_id)
    except ValueError as error:
        raise ApiError(400, str(error), param="session_id") from error


async def _collect(answers: Answers, choices: Sequence[Choice]) -> None:
    async for index, output in answers:
        choices[index].take(output)


async def while_connected(request: Request, work: Awaitable[_T]) -> _T:
    """The result of `work`, which is cancelled when the client leaves.

    Raises:
        ApiError: the client has left, and does not read this.
    """

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.create_task(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ApiError(499, "the client closed the connection")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def create_app(served: Served) -> FastAPI:
    """The application of an engine that runs."""
    app = FastAPI(
        title="offload", version=__version__, responses=ERRORS, docs_url=None, redoc_url=None
    )
    install(app)
    engine, texts = served.engine.engine, served.texts

    @app.post("/v1/chat/completions", responses=answer_or_stream(ChatAnswer))
    async def chat(body: ChatRequest, request: Request) -> Response:
        served.check_model(body.model)
        body.take_defaults(served.sampling_defaults)
        served.check_number(1, body.n)
        ids = await asyncio.to_thread(
            texts.chat_ids,
            body.messages,
            body.usable_tools,
            reads_calls=body.reads_calls,
            template_kwargs=body.chat_template_kwargs,
        )
        return await served.answer(request, body, [ids], Chat(body, served.name, texts))

    @app.post("/v1/responses", responses=answer_or_stream(ResponseAnswer))
    async def responses(body: ResponseRequest, request: Request) -> Response:
        served.check_model(body.model)
        body.take_defaults(served.sampling_defaults)
        chat = body.chat
        ids = await asyncio.to_thread(
            texts.chat_ids,
            chat.messages,
            chat.usable_tools,
            reads_calls=chat.reads_calls,
            field="input",
            template_kwargs=chat.chat_template_kwargs,
        )
        form = response_items.Response(body, served.name, texts)
        return await served.answer(request, chat, [ids], form)

    @app.post("/v1/completions", responses=answer_or_stream(CompletionAnswer))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        served.check_model(body.model)
        body.take_defaults(served.sampling_defaults)
        if not body.prompts or not all(body.prompts):
            raise ApiError(400, "prompt: it is empty", param="prompt")
        served.check_number(len(body.prompts), body.n)

        def prompt(given: str | list[int]) -> tuple[list[int], str]:
            if isinstance(given, str):
                return texts.encode(given), given
            served.check_context(len(given), body)
            return given, texts.decode(given, field="prompt")

        prompts = [await asyncio.to_thread(prompt, given) for given in body.prompts]
        form = Completion(body, served.name, texts, prompts)
        return await served.answer(request, body, [ids for ids, _ in prompts], form)

    @app.get("/v1/models")
    async def models() -> ModelList:
        return {"object": "list", "data": [model_card()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> ModelCard:
        served.check_model(name)
        return model_card()

    def model_card() -> ModelCard:
        return {
            "id": served.name,
            "object": "model",
            "created": served.started,
            "owned_by": "offload",
            "max_model_len": served.max_context,
        }

    @app.get("/v1/sessions")
    async def sessions() -> SessionList:
        entries = await asyncio.to_thread(served.sessions().entries)
        return {
            "object": "list",
            "data": [
                {
                    "id": entry.session_id,
                    "object": "session",
                    "tokens": entry.num_tokens,
                    "bytes": entry.num_bytes,
                    "where": entry.where,
                }
                for entry in entries
            ],
        }

    @app.delete("/v1/sessions/{session_id:path}")
    async def remove_session(session_id: str) -> RemovedSession:
        served.sessions()
        try:
            found = await asyncio.to_thread(engine.remove_session, _checked_id(session_id))
        except SessionInUseError as error:
            raise of_engine(error) from error
        if not found:
            raise ApiError(404, f"there is no session {session_id!r}", param="session_id")
        return {"id": session_id, "object": "session", "deleted": True}

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        served.check_model(body.model)
        if body.messages:
            tokens = await asyncio.to_thread(
                texts.chat_ids,
                body.messages,
                body.tools,
                template_kwargs=body.chat_template_kwargs,
            )
        else:
            special = body.add_special_tokens
            tokens = await asyncio.to_thread(
                texts.encode, body.prompt or "", add_special_tokens=special
            )
        return {"tokens": tokens, "count": len(tokens), "max_model_len": served.max_context}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        served.check_model(body.model)
        return {"prompt": await asyncio.to_thread(texts.decode, body.tokens)}

    @app.get("/health")
    async def health() -> Health:
        if engine.failure is not None:
            raise ApiError(503, f"the engine failed: {engine.failure}")
        return {"status": "ok"}

    @app.get("/ping")
    async def ping() -> Health:
        return await health()

    @app.get("/load")
    async def load() -> Load:
        running, waiting = engine.num_running, engine.num_waiting
        return {"server_load": running + waiting, "running": running, "waiting": waiting}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        return served.metrics.response()

    @app.get("/props")
    async def props() -> Props:
        return {
            "model": served.name,
            "version": __version__,
            "n_ctx": served.max_context,
            "policy": engine.model.policy.name,
            "max_num_seqs": engine.max_num_seqs,
            "max_queued": engine.max_queued,
            "kv_host_bytes": engine.model.kv_store.host_bytes_used,
            "kv_host_budget_bytes": engine.model.kv_store.host_budget_bytes,
            "kv_device_bytes": engine.kv_device_bytes,
            "sessions": engine.sessions is not None,
            "chat_template": texts.tokenizer.chat_template,
        }

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(docs_page(app.openapi()))

    add_page(app)
    return app
