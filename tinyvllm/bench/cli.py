"""The command line of the bench."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import shlex
import sys
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

import tinyvllm
from tinyvllm import _C, hub, loader
from tinyvllm.bench import contenders, measure, op_table, serving_rows
from tinyvllm.bench.ceilings import Ceilings, read_bytes
from tinyvllm.bench.contenders import Contender, Settings, UnavailableError
from tinyvllm.bench.host_table import host_table
from tinyvllm.bench.memory_table import memory_table
from tinyvllm.bench.profile_table import profile_table
from tinyvllm.bench.report import SUBJECT, Report
from tinyvllm.bench.workloads import SIZES, Workload
from tinyvllm.errors import TinyvllmError
from tinyvllm.model_runner import DEFAULT_SIZES
from tinyvllm.ops import get_ops

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tinyvllm.bench.contenders import Run
    from tinyvllm.bench.workloads import Size

COMMANDS = {
    "latency": "one stream: decode speed, share of the read ceiling",
    "throughput": "many requests at once: decode speed of the batch, processor time",
    "streams": "many async streams: speed, time to first token and between tokens",
    "ttft": "one long prompt: time to first token, prefill speed",
    "start": "process start to first token, model cached",
    "ops": "tinyvllm's ops, one by one, in real steps",
    "step": "tinyvllm's host time per token, phase by phase",
    "memory": "tinyvllm's memory: weights, KV cache, the plan of the activations",
    "mixed": "running streams while long prompts arrive: time between tokens",
    "shared": "prompts of a common beginning: what the prefix cache saves",
    "gateway": "streams of chats, from the library and through the WebSocket gateway",
    "all": "everything above",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the process's exit status."""
    options = _parser().parse_args(argv)
    try:
        Bench(options).run()
    except (TinyvllmError, UnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tinyvllm.bench",
        description="Speed of tinyvllm beside other engines: one run, the same prompts, threads "
        "and weights, rounds interleaved; medians and ratios.",
        epilog="\n".join(f"  {name:<11} {text}" for name, text in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="|".join(COMMANDS))
    parser.add_argument(
        "--engine",
        default=",".join(contenders.NAMES),
        help=f"comma separated: {', '.join(contenders.NAMES)}; default: all that are installed",
    )
    parser.add_argument("--model", default=hub.DEFAULT_MODEL, help="alias, directory or org/name")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--threads",
        type=_positive,
        default=_C.num_threads(),
        help="for every engine; default: what affinity and cgroup allow (%(default)s here)",
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="default: %(default)s")
    parser.add_argument(
        "--size",
        choices=tuple(SIZES),
        help="lengths and counts of the workloads; default: cpu on a CPU, full on a GPU",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="step: then every kernel of a decode step too, and the gaps between them",
    )
    parser.add_argument("--json", metavar="FILE", help='JSON lines to FILE; "-" is stdout')
    return parser


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer >= 1")
    return value


class Bench:
    """One run of the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        device = options.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        self._device: str = device
        self._size: Size = options.size or ("cpu" if device == "cpu" else "full")
        self._sizes = SIZES[self._size]
        self._names: list[str] = []
        for name in options.engine.split(","):
            if name not in contenders.NAMES:
                known = ", ".join(contenders.NAMES)
                raise UnavailableError(f"no engine is called {name!r}; engines: {known}")
            self._names.append(name)
        self._model_dir: Path = hub.resolve(options.model)
        self._config = loader.load_config(self._model_dir)
        num_bytes = 8 << 20 if self._size == "tiny" else read_bytes(device)
        self._ceilings = Ceilings(device, options.threads, num_bytes)

    def run(self) -> None:
        options = self._options
        with ExitStack() as files:
            json_file = None
            if options.json == "-":
                json_file = sys.stdout
            elif options.json:
                json_file = files.enter_context(open(options.json, "w", encoding="utf-8"))
            # With JSON lines on stdout the table goes where it is not in their way.
            table = sys.stderr if options.json == "-" else sys.stdout
            self._report = Report(table, json_file)
            self._describe()
            commands = list(COMMANDS)[:-1] if options.command == "all" else [options.command]
            for command in commands:
                getattr(self, f"_{command}")()

    def _describe(self) -> None:
        machine = {
            "processor": _processor(),
            "isa": _C.isa(),
            "gpu": torch.cuda.get_device_name() if self._device == "cuda" else None,
            "python": platform.python_version(),
        }
        versions = {"tinyvllm": tinyvllm.__version__, "torch": torch.__version__}
        for name, package in (("transformers", "transformers"), ("llama.cpp", "llama_cpp_python")):
            try:
                versions[name] = importlib.metadata.version(package)
            except importlib.metadata.PackageNotFoundError:
                continue
        options = self._options
        self._report.write(
            {
                "record": "run",
                "command": shlex.join(["python", "-m", "tinyvllm.bench", *sys.argv[1:]]),
                "model": options.model,
                "device": self._device,
                "threads": options.threads,
                "rounds": options.rounds,
                "machine": machine,
                "versions": versions,
            }
        )
        self._report.print(
            f"{options.model}, BF16, on {machine['gpu'] or machine['processor']} "
            f"({machine['isa']}), {options.threads} threads; "
            f"median of {options.rounds} interleaved rounds; "
            f"{', '.join(f'{name} {version}' for name, version in versions.items())}"
        )
        bandwidth, flops = self._ceilings.read_bandwidth(), self._ceilings.matrix_flops()
        self._report.print(
            f"ceilings now: {bandwidth / 1e9:.1f} GB/s read, {flops / 1e9:,.0f} GFLOP/s BF16"
        )
        (prompt_len, _), (output_len, _) = (
            self._sizes.streams[0].prompt_len,
            self._sizes.streams[0].output_len,
        )
        self._report.print(
            "names: P/N is P prompt tokens, N new tokens per request; latency P/N: one request; "
            f"ttft P; throughput R x P/N: R requests; streams R: R x {prompt_len}/{output_len}"
        )
        self._report.print(
            "ceiling of decode: read bandwidth in the same rounds / bytes of weights per token"
        )
        self._report.print()

    def _contenders(self, stack: ExitStack, workload: Workload) -> list[Contender]:
        """The engines that can run here, each loaded for this workload."""
        found: list[Contender] = []
        for name in self._names:
            try:
                engine = contenders.create(name, self._settings(workload))
            except UnavailableError as reason:
                self._report.note(f"{name} is left out: {reason}")
                continue
            found.append(stack.enter_context(closing(engine)))
        if not found:
            raise UnavailableError("none of the engines can run here")
        return found

    def _settings(self, workload: Workload) -> Settings:
        return Settings(
            model_dir=self._model_dir,
            device=self._device,
            num_threads=self._options.threads,
            max_num_seqs=workload.num_requests,
            max_model_len=workload.max_model_len,
        )

    def _compare(
        self,
        workload: Workload,
        metrics: Callable[[Sequence[Run], float], measure.Metrics],
        **ceiling: Any,
    ) -> None:
        with ExitStack() as stack:
            engines = self._contenders(stack, workload)
            rows, runs = measure.compare(
                workload,
                engines,
                self._options.rounds,
                self._config.vocab_size,
                metrics,
                **ceiling,
            )
            self._report.rows(rows)
            if workload.temperature > 0 or engines[0].name != SUBJECT or len(engines) == 1:
                return
            for engine, others in zip(engines[1:], runs[1:], strict=True):
                agreed, total = measure.same_prefix(runs[0], others)
                self._report.note(
                    f"{workload.name}: {agreed} of {total} greedy tokens equal those of "
                    f"{engine.name} before the first difference"
                )
            self._report.print()

    def _latency(self) -> None:
        for workload in self._sizes.latency:
            self._compare(
                workload,
                measure.latency_metrics,
                ceilings=self._ceilings,
                bytes_read=measure.bytes_per_token(self._config),
            )

    def _ttft(self) -> None:
        for workload in self._sizes.ttft:
            prompt_len = workload.prompt_len[0]
            self._compare(workload, partial(measure.ttft_metrics, prompt_len=prompt_len))

    def _throughput(self) -> None:
        for workload in self._sizes.throughput:
            self._compare(workload, measure.throughput_metrics)

    def _streams(self) -> None:
        for workload in self._sizes.streams:
            self._compare(workload, measure.streams_metrics)

    def _start(self) -> None:
        names = []
        for name in self._names:
            if name != SUBJECT and self._device != "cpu":
                self._report.note(f"{name} is left out of start: measured on the CPU only")
            elif importlib.util.find_spec(_MODULES[name]) is None:
                self._report.note(f"{name} is left out: pip install {_MODULES[name]}")
            else:
                names.append(name)
        options = self._options
        self._report.rows(
            [
                measure.start_row(
                    names, self._model_dir, self._device, options.threads, options.rounds
                )
            ]
        )

    def _ops(self) -> None:
        ops = get_ops("native")
        _C.set_num_threads(self._options.threads)
        steps = op_table.STEPS[self._size]
        model = loader.load_model(
            self._model_dir,
            self._config,
            ops,
            dtype=torch.bfloat16,
            device=torch.device(self._device),
            max_model_len=max(step.context for step in steps),
        )
        op_table.op_table(self._report, model, steps, self._ceilings, self._device)

    def _memory(self) -> None:
        memory_table(self._report, self._config, *DEFAULT_SIZES[self._device])

    def _step(self) -> None:
        options = self._options
        host_table(
            self._report,
            self._model_dir,
            self._device,
            options.threads,
            self._sizes.step,
            options.rounds,
        )
        if options.profile:
            profile_table(
                self._report, self._model_dir, self._device, options.threads, self._sizes.step
            )

    def _mixed(self) -> None:
        options, budget = self._options, DEFAULT_SIZES[self._device][1]
        if self._size == "tiny":
            budget = 16
        self._report.rows(
            serving_rows.mixed_rows(
                self._model_dir, self._device, options.threads, budget, self._size, options.rounds
            )
        )

    def _shared(self) -> None:
        options = self._options
        self._report.rows(
            serving_rows.shared_rows(
                self._model_dir, self._device, options.threads, self._size, options.rounds
            )
        )

    def _gateway(self) -> None:
        from tinyvllm.bench.contenders.gateway_client import ChatContender, GatewayContender

        for workload in self._sizes.streams:
            settings = self._settings(workload)
            with ExitStack() as stack:
                engines: list[Contender] = [
                    stack.enter_context(closing(ChatContender(settings))),
                    stack.enter_context(closing(GatewayContender(settings))),
                ]
                renamed = replace(workload, name=f"gateway: {workload.name}")
                rows, _ = measure.compare(
                    renamed,
                    engines,
                    self._options.rounds,
                    self._config.vocab_size,
                    measure.streams_metrics,
                )
            self._report.rows(rows)


_MODULES = {"tinyvllm": "tinyvllm", "transformers": "transformers", "llama.cpp": "llama_cpp"}


def _processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
