"""What lets SGLang run on a CPU, where it has no kernels of its own."""

import os
from pathlib import Path


def python_path(folder: Path) -> str:
    """Return a PYTHONPATH with one name of vLLM, written into the folder: SGLang imports it and does not call it."""
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    (folder / "vllm" / "__init__.py").touch()
    (folder / "vllm" / "_custom_ops.py").write_text("def rotary_embedding(*_, **__):\n    raise NotImplementedError\n")
    return f"{folder}:{Path(__file__).parents[3]}:{os.environ.get('PYTHONPATH', '')}"
