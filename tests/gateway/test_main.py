"""`python -m tinyvllm.gateway` as a process."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from tinyvllm import ConfigError, EngineConfig
from tinyvllm.gateway.__main__ import main
from tinyvllm.gateway.flags import build_parser, engine_config, limits, read_token

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
# The real command with a fake engine in it, whose answers never end.
FAKE = """
import asyncio
import logging
import sys
from tinyvllm.gateway.__main__ import main
from support.fake_engine import FakeEngine, Script
script = Script(("word ",) * 1_000_000, interval=0.01)
class Loading(FakeEngine):
    async def start(self):
        logging.getLogger("tinyvllm.engine").info("%s: %.0f %%", "loading weights", 10.0)
        logging.getLogger("tinyvllm.engine").info("%s: %.0f %%", "loading weights", 20.0)
        await asyncio.Event().wait()
def new_engine(name, config):
    return Loading(name) if name == "loading" else FakeEngine(name, config, script=script)
sys.exit(main(sys.argv[1:], new_engine=new_engine))
"""


@contextmanager
def serve(*args: str, fake: bool = True) -> Iterator[subprocess.Popen[str]]:
    command = ["-c", FAKE] if fake else ["-m", "tinyvllm.gateway"]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", *command, *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def read_url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], 60)
    assert ready, "no URL within 60 s"
    url = process.stdout.readline().strip()
    assert url.startswith("http://127.0.0.1:"), process.stderr and process.stderr.read()
    return url


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly_under_load(number: signal.Signals) -> None:
    with serve("--port", "0", "--model", "fake", "--drain-seconds", "0.2") as process:
        url = read_url(process)
        with urllib.request.urlopen(url + "healthz", timeout=10) as reply:
            assert json.load(reply)["alive"] is True
        with connect(url.replace("http", "ws") + "v1/responses", proxy=None) as client:
            client.send('{"type":"response.create","input":"Hi"}')
            kinds = [json.loads(client.recv(timeout=10))["type"] for _ in range(6)]
            assert kinds[-1] == "response.output_text.delta"
            process.send_signal(number)
            events = []
            with pytest.raises(ConnectionClosed) as info:
                while True:
                    events.append(json.loads(client.recv(timeout=10)))
            kinds = [event["type"] for event in events]
            assert "tinyvllm.draining" in kinds and kinds[-1] == "response.failed"
            assert events[-1]["response"]["error"]["code"] == "server_shutting_down"
            assert info.value.rcvd is not None and info.value.rcvd.code == 1012
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0
    assert out == ""  # one line, the URL, and that was read
    assert "Traceback" not in err and "rror" not in err
    *_, ready, waiting = err.splitlines()
    assert ready.startswith("ready in ")
    assert waiting == "waiting up to 0.2 s for 1 running response; Ctrl-C again stops at once"


def test_a_signal_while_loading_ends_it_cleanly() -> None:
    with serve("--port", "0", "--model", "loading") as process:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading weights ...\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "", "")


def test_a_busy_port_is_one_clear_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"error: cannot listen on 127.0.0.1:{port}: ") and "--port" in err


def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    missing = tmp_path / "no-model"
    with serve("--port", "0", "--model", str(missing), fake=False) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert "Traceback" not in err
    assert err.splitlines()[-1].startswith("error: ") and "no-model" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--host", "0.0.0.0"], "--insecure"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "500", "--max-num-batched-tokens", "100"], "max_num_batched_tokens"),
        (["--port", "70000"], "--port"),
        (["--device", "tpu"], "device"),
        (["--allow-origin", "chat.example"], "--allow-origin"),
        (["--token", "no spaces"], "token"),
        (["--token-file", "/no/such/file"], "--token-file"),
        (["--tls-key", "key.pem"], "--tls-cert"),
        (["--tls-cert", "/no/such/file"], "--tls-cert"),
        (["--stall-seconds", "0"], "--stall-seconds"),
    ],
)
def test_wrong_arguments(args: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(["--port", "0", *args])
    except SystemExit as exc:
        code = exc.code  # argparse's
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert words in err.splitlines()[-1]


def test_engine_flags_reach_the_config() -> None:
    args = build_parser().parse_args(
        "--device cpu --max-num-seqs 4 --max-model-len 512 --num-threads 2 --block-size 32 "
        "--no-prefix-caching --enforce-eager --scheduling static --expected-seq-len 300 "
        "--max-buffered-tokens 50".split()
    )
    config = engine_config(args)
    assert (config.device, config.max_num_seqs, config.max_model_len) == ("cpu", 4, 512)
    assert (config.num_threads, config.block_size, config.scheduling) == (2, 32, "static")
    assert (config.expected_seq_len, config.max_buffered_tokens) == (300, 50)
    assert config.enforce_eager and not config.enable_prefix_caching
    assert engine_config(build_parser({}).parse_args([])) == EngineConfig()


def test_flags_can_come_from_the_environment(tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("from-a-file\n")
    environ = {
        "TINYVLLM_MAX_NUM_SEQS": "4",
        "TINYVLLM_ALLOW_ORIGIN": "https://a.example https://b.example",
        "TINYVLLM_COMPRESSION": "1",
        "TINYVLLM_INSECURE": "0",
        "TINYVLLM_RESUME_SECONDS": "7.5",
        "TINYVLLM_TOKEN_FILE": str(token_file),
    }
    args = build_parser(environ).parse_args(["--max-num-seqs", "5"])
    assert engine_config(args).max_num_seqs == 5  # a flag wins
    assert args.allow_origin == ["https://a.example", "https://b.example"]
    assert args.compression and not args.insecure
    assert limits(args).resume_seconds == 7.5
    assert read_token(args) == "from-a-file"
    with pytest.raises(SystemExit):
        build_parser({"TINYVLLM_MAX_NUM_SEQS": "0"}).parse_args([])
    with pytest.raises(SystemExit):
        build_parser({"TINYVLLM_INSECURE": "perhaps"}).parse_args([])


def test_other_machines_need_a_token() -> None:
    def token_of(*argv: str) -> str | None:
        return read_token(build_parser({}).parse_args(argv))

    assert token_of() is None
    assert token_of("--host", "0.0.0.0", "--token", "secret") == "secret"
    assert token_of("--host", "0.0.0.0", "--insecure") is None
    with pytest.raises(ConfigError, match="token"):
        token_of("--host", "0.0.0.0")


def test_logs_are_json_lines_and_tell_nothing_of_what_people_write() -> None:
    flags = "--port 0 --model fake --log-format json --log-level debug --drain-seconds 0"
    with serve(*flags.split()) as process:
        url = read_url(process)
        with connect(url.replace("http", "ws") + "v1/responses", proxy=None) as client:
            event = {"type": "response.create", "input": "my-secret", "instructions": "my-secret"}
            client.send(json.dumps(event))
            for _ in range(6):
                client.recv(timeout=10)
            client.send('{"type":"my-secret"}')
            process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionClosed):
                while True:
                    client.recv(timeout=10)
        _, err = process.communicate(timeout=20)
    assert "my-secret" not in err
    lines = [json.loads(line) for line in err.splitlines() if line.startswith("{")]
    messages = [line["message"] for line in lines]
    assert {"socket open", "draining", "response failed", "socket closed"} <= set(messages)
    (ended,) = [line for line in lines if line["message"] == "response failed"]
    assert len(ended["tag"]) == 8 and ended["reason"] == "server_shutting_down"


def test_every_field_of_the_config_has_a_flag() -> None:
    flags = vars(build_parser().parse_args([]))
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields - set(flags) == {"enable_prefix_caching", "async_scheduling"}
    assert {"no_prefix_caching", "no_async_scheduling"} <= set(flags)


def test_help_tells_of_every_flag() -> None:
    text = build_parser().format_help()
    for flag in ("--model", "--host", "--port", "--max-num-seqs", "--device", "--num-threads"):
        assert flag in text
