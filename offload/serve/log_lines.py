"""How a server writes its log: a record is a line of text, or a JSON object."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import datetime
from typing import Any

request_id: ContextVar[str | None] = ContextVar("request_id", default=None)
"""The request that a record is about, where it has no fields of its own."""

_IN_MESSAGE = ("method", "route", "status")


def _time(record: logging.LogRecord, sep: str = "T") -> str:
    at = datetime.fromtimestamp(record.created).astimezone()
    return at.isoformat(sep=sep, timespec="milliseconds")


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] | None = getattr(record, "fields", None)
    if found is not None:
        return found
    of_request = request_id.get()
    return {} if of_request is None else {"id": of_request}


class TextLines(logging.Formatter):
    """Time, level, message, and fields as name=value; a traceback has lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """As logging calls it."""
        parts = [_time(record, " "), f"{record.levelname:8}", record.getMessage()]
        for name, value in _fields(record).items():
            if name not in _IN_MESSAGE:
                parts.append(f"{name}={_value(value)}")
        line = " ".join(parts)
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _value(value: Any) -> str:
    """Quoted where a reader could take it for more than one."""
    text = str(value)
    return text if text.isascii() and text.isprintable() and " " not in text else json.dumps(text)


class JsonLines(logging.Formatter):
    """One object in a line: time, level, logger, message, fields, and exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """As logging calls it."""
        made = {
            "time": _time(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            made["exception"] = self.formatException(record.exc_info)
        return json.dumps(made, default=str)


FORMS: dict[str, logging.Formatter] = {"text": TextLines(), "json": JsonLines()}
