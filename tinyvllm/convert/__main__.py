"""The command line: `python -m tinyvllm.convert IN.gguf OUT_DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tinyvllm.convert import convert_gguf
from tinyvllm.errors import ModelError
from tinyvllm.progress import ProgressPrinter


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tinyvllm.convert",
        description="Convert a GGUF model to a directory of BF16 safetensors that tinyvllm serves.",
    )
    parser.add_argument("gguf", type=Path, metavar="IN.gguf")
    parser.add_argument("out_dir", type=Path, metavar="OUT_DIR", help="a new directory")
    args = parser.parse_args(arguments)
    try:
        convert_gguf(args.gguf, args.out_dir, progress=ProgressPrinter())
    except ModelError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
