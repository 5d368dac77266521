"""What all requests are made of. A field that is not there is refused, as is one that is not
supported yet unless it has its default value."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, model_validator

_T = TypeVar("_T")


def only(*values: Any) -> AfterValidator:
    """A field that has no other effect than its default."""

    def check(value: _T) -> _T:
        if not any(value == each and type(value) is type(each) for each in values):
            raise ValueError("this is not supported yet; leave it out")
        return value

    return AfterValidator(check)


class Body(BaseModel):
    """null is as good as nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {k: v for k, v in data.items() if v is not None or k not in cls.model_fields}
