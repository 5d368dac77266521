"""What an answer must be: the fields that say so, as grammars in llguidance's Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from llguidance import LLMatcher
from pydantic import Field, model_validator

from offload.serve.bodies import Body, at_most

# A schema's own "x-guidance" has no effect: a keyword that is not enforced is refused. White space
# is a blank, or a new line and its indent: a weak model would never come to an end of it.
_OPTIONS = {"lenient": False, "coerce_one_of": False, "whitespace_pattern": r"( |\n *)?"}


_Choice = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class Constraint:
    """What an answer must be.

    Attributes:
        field: of the request, which asks for it.
        schemas: JSON that `grammar` has.
        grammar: made where there is time for it.
    """

    field: str
    schemas: Any
    grammar: Callable[[], str]


class JsonSchema(Body):
    """A schema with a name; `strict` changes nothing: it is always enforced."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False


class ResponseFormat(Body):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema is needed with the type json_schema, and only there")
        return self

    def constraint(self) -> Constraint | None:
        """None: any text."""
        if self.type == "text":
            return None
        schema = {"type": "object"} if self.json_schema is None else self.json_schema.schema_
        return Constraint("response_format", schema, lambda: f"start: {json_rule(schema)}")


class StructuredOutputs(Body):
    """vLLM's: one of these."""

    schema_: dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[_Choice], at_most(2**14, least=1)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _one(self) -> StructuredOutputs:
        given = (self.schema_, self.regex, self.choice, self.grammar)
        if sum(each is not None for each in given) != 1:
            raise ValueError("give one of json, regex, choice and grammar")
        return self

    def constraint(self) -> Constraint:
        """As `ResponseFormat.constraint`."""
        return Constraint("structured_outputs", self.schema_, self._grammar)

    def _grammar(self) -> str:
        if self.schema_ is not None:
            return f"start: {json_rule(self.schema_)}"
        if self.regex is not None:
            return LLMatcher.grammar_from_regex(self.regex)
        if self.choice is not None:
            return "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, self.choice))
        return self.grammar or ""


def json_rule(schema: dict[str, Any]) -> str:
    """A piece of a grammar: JSON that validates."""
    return "%json " + json.dumps(schema | {"x-guidance": _OPTIONS})


def calls_grammar(schemas: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """One call, as JSON with `name` and `arguments`.

    Args:
        schemas: names, and schemas of arguments.
    """
    rules = ["start: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
    for i, (name, schema) in enumerate(schemas):
        head = json.dumps(f'{{"name": "{name}", "arguments": ')
        rules.append(f'call_{i}: {head} {json_rule(schema)} "}}"')
    return "\n".join(rules)
