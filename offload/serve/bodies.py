"""What all requests are made of. A field that is not there is refused, as is one that is not
supported yet unless it has its default value."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import CoreSchema

_T = TypeVar("_T")
_MOST_FIELDS = 1024


def at_most(number: int, *, least: int = 0) -> Any:
    """A list with a limit. Its first wrong item ends it: millions of errors take a minute."""
    return Field(min_length=least, max_length=number, fail_fast=True)


def described(**keywords: Any) -> Any:
    """What JSON schema says of a field that is checked elsewhere."""
    return Field(json_schema_extra=keywords)


class _Only(AfterValidator):
    def __init__(self, values: tuple[Any, ...], reason: str) -> None:
        def check(value: _T) -> _T:
            if not any(value == each and type(value) is type(each) for each in values):
                raise ValueError(reason)
            return value

        super().__init__(check)
        object.__setattr__(self, "_schema", {"enum": [*values, None]})

    def __get_pydantic_json_schema__(self, *args: Any) -> dict[str, Any]:
        return {**vars(self)["_schema"]}


def only(*values: Any, reason: str = "this is not supported yet; leave it out") -> AfterValidator:
    """A field that has no other effect than its default."""
    return _Only(values, reason)


class Body(BaseModel):
    """null is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: Any) -> dict[str, Any]:
        made: dict[str, Any] = handler(schema)
        found = handler.resolve_ref_schema(made)
        for name, field in found["properties"].items():
            if name not in found.get("required", ()):
                found["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return made

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, value in (("an object", data), *data.items()):
            if isinstance(value, dict) and len(value) > _MOST_FIELDS:
                raise ValueError(f"{name} has more than {_MOST_FIELDS} fields")
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}
