"""The command `vllm`, on a machine that is busy: `python -m integrations.vllm.serve serve MODEL...`.

vLLM gives the process that coordinates data-parallel ranks two minutes to start. Here it may take longer.
"""

import multiprocessing.connection
from typing import Any

PATIENCE = 900  # seconds


def main() -> None:
    """Run the command."""
    wait = multiprocessing.connection.wait

    def patient(objects: Any, timeout: float | None = None) -> Any:
        return wait(objects, None if timeout is None else max(timeout, PATIENCE))

    multiprocessing.connection.wait = patient
    from vllm.entrypoints.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
