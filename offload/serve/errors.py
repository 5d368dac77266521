"""Every error as OpenAI's error object."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from offload.engine.engine import QueueFullError
from offload.engine.sampling_params import SamplingParams
from offload.engine.sessions import SessionInUseError
from offload.serve.request_log import current
from offload.system.errors import HostBudgetError

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
_HAS_VALUE = ("missing", "value_error", "too_short", "too_long")  # or has none, or its length
_NO_OBJECT = "the body must be a JSON object, with Content-Type: application/json"
_TOO_DEEP = "the body is nested too deeply"


class ApiError(HTTPException):
    """An answer with an error status.

    Args:
        param: the field of the request that is at fault.
        logged: what the log has for `message`, which may repeat the request's text.
        details: further fields of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        logged: str | None = None,
        **details: Any,
    ) -> None:
        headers = {401: {"WWW-Authenticate": "Bearer"}}.get(status)
        if status in (429, 503):
            headers = {"Retry-After": "1"}
        super().__init__(status, message, headers)
        self.logged = message if logged is None else logged
        kind = _TYPES.get(status, "invalid_request_error")
        message = message.encode(errors="backslashreplace").decode()
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code} | details
        }

    def response(self) -> JSONResponse:
        """The whole answer to the current request, whose line of the log tells it, too."""
        current().fails(self.status_code, self.logged)
        return JSONResponse(self.body, self.status_code, self.headers)


def context_error(num_prompt_tokens: int, max_tokens: int | None, max_context: int) -> ApiError:
    """A prompt, or it and the answer, beyond the model's context."""
    answer = f" and {max_tokens} of answer" if max_tokens else ""
    code = "exceed_context_size_error"
    return ApiError(
        400,
        f"{num_prompt_tokens} tokens of prompt{answer} exceed the context of {max_context} tokens",
        code=code,
        type=code,
        n_prompt_tokens=num_prompt_tokens,
        n_ctx=max_context,
    )


def of_engine(error: BaseException) -> ApiError:
    """What an error of the engine is to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full")
    if isinstance(error, SessionInUseError):
        return ApiError(409, str(error), param="session_id", code="session_in_use")
    if isinstance(error, HostBudgetError):
        return ApiError(400, str(error), code="exceed_host_budget_error")
    if isinstance(error, ValueError):
        first = str(error).split(" ")[0].removesuffix(":")
        return ApiError(400, str(error), param=first if hasattr(SamplingParams(), first) else None)
    return ApiError(503, str(error) or type(error).__name__)


def _innermost(error: RequestValidationError) -> tuple[dict[str, Any], list[str]]:
    """The deepest error in the first wrong field, and where in the body that field is.

    A field of several types has an error for each, and the one that got furthest is the one that
    was meant; of two as far, the one that is not about the type.
    """
    errors = error.errors()
    places = [(each, _place(error.body, each)) for each in errors]
    return max(
        (pair for pair in places if pair[1][:1] == places[0][1][:1]),
        key=lambda pair: (len(pair[1]), not pair[0]["type"].endswith("_type")),
    )


def _place(body: Any, error: Mapping[str, Any]) -> list[str]:
    """Without the names of types that pydantic has between the fields."""
    place, location = [], error["loc"][1:]
    for i, part in enumerate(location):
        is_item = isinstance(body, list) and isinstance(part, int)
        is_missing = error["type"] == "missing" and i == len(location) - 1
        if is_item or (isinstance(body, dict) and part in body):
            body = body[part]
        elif not is_missing:
            continue
        place.append(str(part))
    return place


def install(app: FastAPI) -> None:
    """Have the errors of all routes answered so."""

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        if not isinstance(error, ApiError):  # routing, and bodies that are no JSON
            headers, detail = error.headers, str(error.detail)
            if isinstance(error.__cause__, RecursionError):
                detail = _TOO_DEEP
            elif isinstance(error.__cause__, ValueError):  # not UTF-8, or a number of many digits
                detail = f"the body is not JSON: {error.__cause__}"
            error = ApiError(error.status_code, detail)
            error.headers = headers  # a 405 says what is allowed
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def of_validation(request: Request, error: RequestValidationError) -> JSONResponse:
        first, where = _innermost(error)
        if first["type"] == "json_invalid":
            at = f"{first['ctx']['error']} at character {first['loc'][-1]}"
            return ApiError(400, f"the body is not JSON: {at}").response()
        if not where and first["type"] in ("missing", "model_attributes_type"):
            return ApiError(400, _NO_OBJECT).response()
        if first["type"] == "extra_forbidden":
            message = f"unknown field {where[-1]!r}"
        elif first["type"] == "value_error":
            message = str(first["ctx"]["error"])
        else:
            message = first["msg"]
        value = ""
        if first["type"] not in (*_HAS_VALUE, "extra_forbidden"):
            value = f", got {reprlib.repr(first['input'])}"
        field, param = ".".join(where), where[0] if where else None
        if first["type"] == "extra_forbidden":
            param = None  # which may be no text
        message = f"{field}: {message}" if field else message
        return ApiError(400, message + value, param=param, logged=message).response()

    @app.exception_handler(RecursionError)
    async def of_depth(request: Request, error: RecursionError) -> JSONResponse:
        return ApiError(400, _TOO_DEEP).response()

    @app.exception_handler(Exception)
    async def of_defect(request: Request, error: Exception) -> JSONResponse:
        return ApiError(500, "internal error; the server's log has it").response()
