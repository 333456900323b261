"""Goldens on a mesh of host devices, in a process of its own: devices are fixed at JAX's start.

    python mesh_cases.py < cases.json        [{"family": ..., setting: ...}, ...]

prints a JSON object a line: {"case": ..., "error": "" or what differs, "stats": ...}.
"""

import json
import os
import sys
import traceback

os.environ["JAX_PLATFORMS"] = "cpu"


def run_case(case: dict) -> dict:
    import test_goldens

    settings = {k: v for k, v in case.items() if k not in ("family", "expect")}
    return test_goldens.check_golden(case["family"], block_size=16, max_num_seqs=4, **settings)


def main() -> None:
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    for case in json.load(sys.stdin):
        try:
            line = {"error": "", "stats": run_case(case)}
        except Exception as error:  # noqa: BLE001 - told to the test
            line = {"error": traceback.format_exc(limit=-3) + str(error)[:500], "stats": {}}
        print(json.dumps({"case": case, **line}), flush=True)


if __name__ == "__main__":
    main()
