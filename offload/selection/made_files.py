"""Files that say what was found out about a model, and which model and weights that is."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from offload.models.checkpoint_names import same_checkpoint
from offload.system.json_file import read_json

Made = TypeVar("Made", bound="MadeFile")
SHAPE_KEYS = ("num_layers", "num_kv_heads", "head_dim")
COMMON_KEYS = ("model_type", *SHAPE_KEYS, "checkpoint", "made_by")


@dataclass(frozen=True)
class MadeFile:
    """What such a file holds; a subclass adds what was found.

    Attributes:
        kind: what errors call the file, before its path; bare_kind: what was made without one.
        remedy: what to do where it is for another model.
        command: of `offload`, what writes one to the path that follows.
        format: of the file; keys: in their order there.
        model_type: transformers' name of the architecture, such as "llama"; "" fits any.
        num_layers, num_kv_heads, head_dim: shape of the model.
        made_by: how it was chosen, for people.
        checkpoint: name of the weights it was made for (`loading.names.checkpoint_name`); "" is
            unknown and fits any.
        source: the file that it was read from, for messages; "" if there is none.
    """

    kind: ClassVar[str]
    bare_kind: ClassVar[str]
    remedy: ClassVar[str]
    command: ClassVar[str]
    format: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]

    model_type: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    made_by: str = field(default="", kw_only=True)
    checkpoint: str = field(default="", kw_only=True)
    source: str = field(default="", compare=False, kw_only=True)

    @property
    def _name(self) -> str:
        return f"{self.kind} {self.source}" if self.source else self.bare_kind

    def _check_made(self) -> None:
        """Refuse texts that are none, and a shape that none is."""
        texts = (self.model_type, self.checkpoint, self.made_by)
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{self._name}: model_type, checkpoint and made_by must be strings")
        for key in SHAPE_KEYS:
            value = getattr(self, key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(
                    f"{self._name}: {key} must be an integer of at least 1, got {value!r}"
                )

    def check(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        model_type: str | None = None,
        checkpoint: str = "",
    ) -> None:
        """Refuse a model that it was not made for, or weights of its shape that it was not.

        Args:
            model_type: None leaves it unchecked.
            checkpoint: as the attribute.

        Raises:
            ValueError: names the file, what it is for, and what the model has.
        """
        wanted: dict[str, int | str] = {
            "num_layers": num_layers,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
        }
        if model_type is not None and self.model_type:
            wanted = {"model_type": model_type, **wanted}
        if all(getattr(self, key) == value for key, value in wanted.items()):
            if not same_checkpoint(self.checkpoint, checkpoint):
                raise ValueError(
                    f"{self._name} was made for other weights of this shape: those of checkpoint "
                    f"{self.checkpoint}, but this model is checkpoint {checkpoint}; {self.remedy}"
                )
            return
        ours = ", ".join(f"{key}={getattr(self, key)}" for key in wanted)
        theirs = ", ".join(f"{key}={value}" for key, value in wanted.items())
        raise ValueError(
            f"{self._name} was made for another model: it says {ours}, this model has {theirs}; "
            f"{self.remedy}"
        )

    def keep(self, path: Path) -> None:
        """`save`, with the folder that the file lies in: as a whole or not at all, whoever reads it
        meanwhile.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".made-", dir=path.parent) as temporary:
            whole = Path(temporary) / path.name
            self.save(whole)
            whole.replace(path)

    def save(self, path: str | Path) -> None:
        """Write it as JSON: a line per key, and per row of a table."""
        document = {"format": self.format, **{key: getattr(self, key) for key in self.keys}}
        lines = [f"  {json.dumps(key)}: {_dumped(value)}" for key, value in document.items()]
        text = ",\n".join(lines)
        Path(path).write_text(f"{{\n{text}\n}}\n", encoding="utf-8")

    @classmethod
    def load(cls: type[Made], path: str | Path) -> Made:
        """Read such a file.

        Raises:
            FileNotFoundError: there is none.
            ValueError: not JSON, another format, keys missing or unknown, or values that the class
                refuses; names the file.
        """
        hint = f"; write one with `offload {cls.command} {path}`"
        document = read_json(path, cls.kind, hint=hint)
        name = f"{cls.kind} {path}"
        if not isinstance(document, dict):
            raise ValueError(f"{name} must hold a JSON object, got a {type(document).__name__}")
        keys = ("format", *cls.keys)
        wrong = {
            "missing": [key for key in keys if key not in document],
            "unknown": sorted(set(document) - set(keys)),
        }
        if any(wrong.values()):
            found = " and ".join(f"{what} keys {names}" for what, names in wrong.items() if names)
            raise ValueError(f"{name} has {found}; its keys: {', '.join(keys)}")
        if document.pop("format") != cls.format:
            raise ValueError(f"{name} has another format than {cls.format!r}")
        return cls(**document, source=str(path))


def _dumped(value: Any) -> str:
    if not (isinstance(value, tuple) and value and isinstance(value[0], tuple)):
        return json.dumps(value)
    rows = ",\n".join(f"    {json.dumps(row)}" for row in value)
    return f"[\n{rows}\n  ]"
