"""Imports point one way: read off the AST of every module.

The table below is the law. A new module has no row, so the test fails until somebody says where it
stands.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Module (or package, for all that is in it) -> what it may import of tinyvllm, besides itself.
HOST = ("errors", "config", "sampling_params", "sequence", "block_manager", "scheduler")
DEVICE = ("_C", "ops", "models", "loader", "cuda_steps", "slot_logits", "model_runner")
ALLOWED: dict[str, tuple[str, ...]] = {
    "version": (),
    "_C": (),
    # The host column: each sees those before it.
    **{name: HOST[:place] for place, name in enumerate(HOST)},
    "progress": (),
    "chat_template": ("errors",),
    "tokenizer": ("errors", "config", "chat_template"),
    "detokenizer": ("errors", "tokenizer"),
    "structured": ("errors", "sampling_params", "tokenizer", "detokenizer"),
    "allowed_tokens": ("errors", "sampling_params", "tokenizer", "structured"),
    # The device column.
    "ops": ("_C", "errors"),
    "models": ("ops", "errors", "config"),
    "checkpoint": ("errors",),
    "staging": ("errors", "checkpoint"),
    "gpu_memory": (),
    "loader": ("errors", "config", "ops", "models", "checkpoint", "staging", "gpu_memory"),
    "convert": ("errors", "config", "models", "checkpoint", "loader", "progress"),
    "hub": ("errors", "convert", "progress"),
    "cuda_steps": ("_C", "batch", "gpu_memory"),
    "slot_logits": ("ops", "batch", "sequence"),
    "model_runner": (
        *("errors", "config", "_C", "ops", "models", "loader", "batch", "cuda_steps"),
        *("slot_logits", "sequence", "gpu_memory"),
    ),
    # Where the columns meet.
    "batch": (*HOST, "models"),
    "stream": ("errors", "sampling_params"),
    "metrics": (),
    "engine": (
        *(*HOST, *DEVICE, "batch", "hub", "tokenizer", "detokenizer", "stream", "metrics"),
        *("structured", "allowed_tokens"),
    ),
    "async_engine": (*HOST[:3], "hub", "tokenizer", "stream", "metrics", "engine"),
    "llm": (*HOST[:3], "hub", "tokenizer", "stream", "engine", "async_engine"),
}
# The public face, and what stands on it: these may import every module that has a row above.
FACE = ("__init__", "bench")
TORCHLESS = (
    *(*HOST, "chat_template", "tokenizer", "detokenizer", "structured", "allowed_tokens"),
    *("stream", "progress"),
)
LAZY = (
    "transformers",
    "llguidance",
    "prometheus_client",
    "huggingface_hub",
    "gguf",
    "websockets",
    "llama_cpp",
    "uvloop",
)


class Import:
    """One import statement: the module that makes it, its target as a dotted name, its line."""

    def __init__(self, importer: str, target: str, names: tuple[str, ...], line: int) -> None:
        self.importer, self.target, self.names, self.line = importer, target, names, line

    def __repr__(self) -> str:
        names = f" ({', '.join(self.names)})" if self.names else ""
        return f"{self.importer}:{self.line} imports {self.target}{names}"


def read_imports(source: str, module: str, *, is_package: bool = False) -> list[Import]:
    """Every import of `module` (dotted), inside functions and under TYPE_CHECKING too."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [Import(module, alias.name, (), node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")[: None if is_package else -1]
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *filter(None, [base])])
            names = tuple(alias.name for alias in node.names)
            found.append(Import(module, base, names, node.lineno))
    return found


def typing_only_lines(source: str) -> set[int]:
    """Lines under `if TYPE_CHECKING:`, which never run."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.If)
            and isinstance(node.test, ast.Name)
            and node.test.id == "TYPE_CHECKING"
        ):
            for child in node.body:
                lines.update(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return lines


def sources(root: Path) -> dict[str, tuple[str, bool]]:
    """Dotted name -> (source, is it a package's __init__) for every module under tinyvllm/."""
    found = {}
    # rglob does not follow the link tinyvllm/gateway on every Python: the folder is read by itself.
    for folder, prefix in ((root / "tinyvllm", "tinyvllm"), (root / "gateway", "tinyvllm.gateway")):
        for path in sorted(folder.rglob("*.py")):
            if folder.name == "tinyvllm" and "gateway" in path.relative_to(folder).parts:
                continue
            parts = path.relative_to(folder).with_suffix("").parts
            is_package = parts[-1] == "__init__"
            name = ".".join([prefix, *(parts[:-1] if is_package else parts)])
            found[name] = (path.read_text(encoding="utf-8"), is_package)
    return found


def row(module: str) -> str:
    """The table's key for a dotted module: its first part below tinyvllm."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def targets(imported: Import, modules: set[str]) -> list[str]:
    """The tinyvllm modules that the statement loads: `from tinyvllm import x` may mean x itself."""
    if imported.target.split(".")[0] != "tinyvllm":
        return []
    inside = [f"{imported.target}.{name}" for name in imported.names]
    known = [name for name in inside if name in modules or row(name) == "_C"]
    plain = len(known) < len(imported.names) or not imported.names
    return [*known, *([imported.target] if plain else [])]


def violations(tree: dict[str, tuple[str, bool]], public: set[str]) -> list[str]:
    """Every import of `tree` that the table does not allow, in words."""
    wrong = []
    modules = set(tree)
    runtime: dict[str, set[str]] = {name: set() for name in tree}
    torch_users: dict[str, int] = {}
    for name, (source, is_package) in tree.items():
        typing_only = typing_only_lines(source)
        for imported in read_imports(source, name, is_package=is_package):
            here, line = row(name), imported.line
            if imported.target.split(".")[0] == "torch":
                if line not in typing_only:
                    torch_users[name] = line
                if here in TORCHLESS:
                    wrong.append(f"{imported}: the host column knows no torch")
            for target in targets(imported, modules):
                if line not in typing_only and target != name:
                    runtime[name].add(target)
                there = row(target)
                if here == "gateway":
                    if target == "tinyvllm":
                        private = [n for n in imported.names if n not in public]
                        if private or not imported.names:
                            wrong.append(f"{imported}: {private or 'tinyvllm'} is not public")
                    elif there != "gateway":
                        wrong.append(f"{imported}: the gateway imports only what tinyvllm exports")
                elif there == here:
                    continue
                elif here in FACE:
                    if there not in ALLOWED and there != "__init__":
                        wrong.append(f"{imported}: nothing imports {there}")
                elif here not in ALLOWED:
                    wrong.append(f"{name} has no row in tests/test_imports.py: say where it stands")
                elif there not in ALLOWED[here]:
                    wrong.append(f"{imported}: {here} may import {', '.join(ALLOWED[here]) or '-'}")
    for name in tree:
        if row(name) not in TORCHLESS:
            continue
        wrong += [
            f"{name} reaches torch through {reached}:{torch_users[reached]}"
            for reached in reachable(name, runtime)
            if reached in torch_users
        ]
    wrong += [f"import cycle: {' -> '.join(cycle)}" for cycle in cycles(runtime)]
    return wrong


def reachable(start: str, graph: dict[str, set[str]]) -> set[str]:
    """Modules that importing `start` loads, the package's own __init__ aside."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        for target in graph.get(waiting.pop(), ()):
            if target not in seen and target != "tinyvllm":
                seen.add(target)
                waiting.append(target)
    return seen


def cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """One path for each module that reaches itself, found by walking depth first."""
    found: list[list[str]] = []
    done: set[str] = set()

    def walk(name: str, path: list[str]) -> None:
        if name in path:
            found.append([*path[path.index(name) :], name])
            return
        if name in done:
            return
        for target in sorted(graph.get(name, ())):
            # A package's __init__ may import its own modules, and they their package's names.
            if not target.startswith(name + ".") and not name.startswith(target + "."):
                walk(target, [*path, name])
        done.add(name)

    for name in sorted(graph):
        walk(name, [])
    return found


def public_names() -> set[str]:
    """`tinyvllm.__all__`, read off the source."""
    tree = ast.parse((ROOT / "tinyvllm" / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "__all__" and node.value is not None:
                return set(ast.literal_eval(node.value))
    raise AssertionError("tinyvllm/__init__.py has no literal __all__")


def test_imports_point_one_way() -> None:
    assert violations(sources(ROOT), public_names()) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("tinyvllm.errors", "from tinyvllm.config import EngineConfig", "errors may import -"),
        ("tinyvllm.scheduler", "import torch", "knows no torch"),
        ("tinyvllm.scheduler", "def f():\n    from torch import Tensor", "knows no torch"),
        ("tinyvllm.scheduler", "from . import loader", "scheduler may import"),
        ("tinyvllm.block_manager", "import tinyvllm.scheduler", "block_manager may import"),
        ("tinyvllm.detokenizer", "from tinyvllm.tokenizer import T", "reaches torch through"),
        ("tinyvllm.ops.native", "from tinyvllm.models import llama", "ops may import"),
        ("tinyvllm.models.layers", "from ..scheduler import S", "models may import"),
        ("tinyvllm.model_runner", "from tinyvllm import scheduler", "model_runner may import"),
        ("tinyvllm.gateway.server", "from tinyvllm.engine import Engine", "what tinyvllm exports"),
        ("tinyvllm.gateway.server", "from tinyvllm import engine", "what tinyvllm exports"),
        ("tinyvllm.gateway.server", "from tinyvllm import Secret", "is not public"),
        ("tinyvllm.engine", "from tinyvllm.gateway import server", "engine may import"),
        ("tinyvllm.bench.cli", "from tinyvllm.gateway import server", "nothing imports gateway"),
        ("tinyvllm.novelty", "from tinyvllm import errors", "say where it stands"),
    ],
)
def test_the_check_sees_a_broken_rule(module: str, source: str, complaint: str) -> None:
    tree = {
        "tinyvllm": ("", True),
        "tinyvllm.errors": ("", False),
        "tinyvllm.loader": ("", False),
        "tinyvllm.engine": ("", False),
        "tinyvllm.scheduler": ("", False),
        "tinyvllm.models": ("", True),
        "tinyvllm.tokenizer": ("import torch", False),
        module: (source, False),
    }
    found = violations(tree, {"AsyncEngine"})
    assert any(complaint in text and module in text for text in found), found


def test_the_check_sees_a_cycle() -> None:
    tree = {
        "tinyvllm.batch": ("from tinyvllm.models import x", False),
        "tinyvllm.models": ("from tinyvllm.loader import y", True),
        "tinyvllm.loader": ("from tinyvllm import batch", False),
    }
    assert any(text.startswith("import cycle: ") for text in violations(tree, set()))


def test_the_check_accepts_what_is_allowed() -> None:
    tree = {
        "tinyvllm": ('from tinyvllm.errors import E\n__all__ = ["E"]', True),
        "tinyvllm.errors": ("import math", False),
        "tinyvllm.config": ("from .errors import E", False),
        "tinyvllm.ops": ("if TYPE_CHECKING:\n    from torch import Tensor", True),
        "tinyvllm.ops.native": ("import torch\nfrom tinyvllm import _C", False),
        "tinyvllm.gateway": ("", True),
        "tinyvllm.gateway.server": ("from tinyvllm import E\nfrom .protocol import P", False),
        "tinyvllm.gateway.protocol": ("", False),
        "tinyvllm.bench": ("from tinyvllm.engine import Engine", True),
    }
    assert violations(tree, {"E"}) == []


def test_kernels_know_no_framework() -> None:
    """Only bindings.cpp (and the DLPack caster it includes) may see pybind11 or Python."""
    framework = re.compile(r'#\s*include\s*[<"](pybind11|Python\.h|torch|ATen|c10|caffe2)')
    kernels = [
        path
        for path in (ROOT / "csrc").rglob("*")
        if path.suffix in (".h", ".cpp", ".cu", ".cuh") and path.parent.name != "csrc"
    ]
    kernels += [ROOT / "csrc" / "tensor.h", ROOT / "csrc" / "ops.h"]
    assert len(kernels) > 2
    guilty = [path.name for path in kernels if framework.search(path.read_text(encoding="utf-8"))]
    assert guilty == []


def test_import_is_light() -> None:
    """`import tinyvllm` loads none of the optional or rarely needed packages."""
    code = f"import sys, tinyvllm; print(*[name for name in {LAZY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
