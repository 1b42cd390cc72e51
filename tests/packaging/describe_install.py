"""Run inside an environment under test: prints what `import tinyvllm` gives there, as JSON."""

import importlib.metadata
import importlib.resources
import json

import torch

import tinyvllm.gateway
from tinyvllm import _C
from tinyvllm.ops import native

x = torch.ones(2, 24, dtype=torch.bfloat16)
out = torch.zeros_like(x)
native.rms_norm(out, x, 3 * x[0], 0.0)

package = importlib.resources.files("tinyvllm")
static = importlib.resources.files("tinyvllm.gateway") / "static"
print(
    json.dumps(
        {
            "package": tinyvllm.__file__,
            "gateway": tinyvllm.gateway.__file__,
            "extension": _C.__file__,
            "version": [tinyvllm.__version__, importlib.metadata.version("tinyvllm")],
            "typed": (package / "py.typed").is_file(),
            "static": sorted(entry.name for entry in static.iterdir()),
            "op_result": out.unique().tolist(),
            "has_cuda": _C.has_cuda,
            "num_cuda_devices": _C.num_cuda_devices(),
        }
    )
)
