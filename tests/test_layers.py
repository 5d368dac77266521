"""The order of the rooms: who may import whom, lazy and `TYPE_CHECKING` imports included."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from offload.policies.registry import policy_names

# A room imports those of the lines above its own; rooms of one line do not know each other.
# No room knows `offload` itself, the public names.
ORDER = """
cpu_ops gpu_ops
system
ranks kv
models
prefill selection
policies training
kv_compression
loading decode
planning
runtime
engine
serve
measuring
bench
cli
offload
__main__
"""
LEVEL_OF = {room: i for i, line in enumerate(ORDER.split("\n")) for room in line.split()}
Imports = dict[str, dict[str, int]]  # of each module: which modules, and in which line


def imports_below(root: Path) -> Imports:
    """Imports of the modules of the three packages from each other."""
    trees = {}
    for path in (path for name in LEVEL_OF for path in (root / name).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        trees[name] = ast.parse(path.read_text())
    return {
        name: {found: line for found, line in imported(tree, {*trees}) if found in trees}
        for name, tree in trees.items()
    }


def imported(tree: ast.Module, modules: set[str]) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative: {ast.unparse(node)}"
            for inner in (f"{node.module}.{alias.name}" for alias in node.names):
                yield (inner if inner in modules else node.module), node.lineno


def room(module: str) -> str:
    return module.removeprefix("offload.").split(".")[0]


def against_the_order(imports: Imports) -> list[str]:
    return [
        f"{name}:{line} imports {found}"
        for name, of_module in imports.items()
        for found, line in of_module.items()
        if room(found) != room(name) and LEVEL_OF[room(found)] >= LEVEL_OF[room(name)]
    ]


def ring(imports: Imports) -> list[str]:
    """Modules each of which imports the next, back to the first; none where there is no ring."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1][::-1]
    return []


def test_rooms_import_those_below_them_and_no_files_each_other() -> None:
    imports = imports_below(Path(__file__).parents[1])
    assert len(imports) > 200
    broken, of_ring = against_the_order(imports), ring(imports)
    assert not broken, "\n".join(broken)
    assert not of_ring, " imports ".join(of_ring)


def test_the_import_that_breaks_the_order_is_named(tmp_path: Path) -> None:
    for name, text in {
        "cpu_ops/pool.py": "if TYPE_CHECKING:\n    from offload.system import memory",
        "offload/__init__.py": "from offload.kv import store",
        "offload/system/memory.py": "import offload",
        "offload/kv/store.py": "def late():\n    import cpu_ops.pool, offload.ranks.group",
        "offload/kv/pages.py": "from offload.kv.store import Store",
        "offload/ranks/group.py": "import json",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    imports = imports_below(tmp_path)
    assert sorted(against_the_order(imports)) == [
        "cpu_ops.pool:2 imports offload.system.memory",
        "offload.kv.store:2 imports offload.ranks.group",
        "offload.system.memory:1 imports offload",
    ]
    of_ring = ring(imports)
    assert {*of_ring} == {"cpu_ops.pool", "offload.system.memory", "offload", "offload.kv.store"}
    assert all(to in imports[name] for name, to in pairwise(of_ring))


def test_what_transformers_loads_runs_no_code_of_a_checkpoint() -> None:
    """Every `from_pretrained` of one of its Auto classes says trust_remote_code=False."""
    root = Path(__file__).parents[1]
    found, trusting = 0, []
    for path in [*root.glob("offload/**/*.py"), *root.glob("perf/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                not isinstance(node, ast.Call)
                or not ast.unparse(node.func).endswith(".from_pretrained")
                or ast.unparse(node.func) == "OffloadedModel.from_pretrained"
                or ast.unparse(node.func) == "model_class.from_pretrained"  # of a made-up folder
                or ast.unparse(node.func) == "GenerationConfig.from_pretrained"  # has no code
            ):
                continue
            found += 1
            if not any(
                x.arg == "trust_remote_code" and ast.unparse(x.value) == "False"
                for x in node.keywords
            ):
                trusting.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found >= 7
    assert not trusting, "\n".join(trusting)


def test_policies_are_methods_and_what_their_authors_need() -> None:
    folder = Path(__file__).parents[1] / "offload" / "policies"
    names = {path.stem for path in folder.iterdir() if not path.name.startswith("__")}
    assert names == {*policy_names(), "registry", "base", "blocks", "wrapped"}


def test_few_files_know_the_policy() -> None:
    """Outside of the rooms whose business it is, who is given one, and who fetches it from afar."""
    root = Path(__file__).parents[1] / "offload"
    business = ("policies", "selection", "cli", "bench", "measuring")
    files = [p for p in root.rglob("*.py") if p.relative_to(root).parts[0] not in business]
    texts = {p: re.sub(r"^ *from .* import", "", p.read_text(), flags=re.M) for p in files}
    given = [p for p, text in texts.items() if re.search(r"\bpolicy: (str \| )?Policy\b", text)]
    fetched = [
        f"{path.name}: {found}"
        for path, text in texts.items()
        for found in re.findall(r"\b[a-z_]+\.[a-z_]+\.policy\b", text)
        if not re.match(r"(self|cls)\.(policy|config)\b", found)
    ]
    assert len(given) <= 20
    assert len(fetched) <= 8, fetched
