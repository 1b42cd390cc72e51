"""The one place that holds the version; pyproject.toml and `tinyvllm.__version__` read it."""

__version__ = "0.1.0"
