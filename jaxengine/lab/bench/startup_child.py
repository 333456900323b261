"""One start of an engine for `bench startup`, in a process of its own.

    python -m jaxengine.lab.bench.startup_child BEGAN [engine flags]

BEGAN is when the parent began, by time.time(). The last line printed is a JSON object: seconds
since then until modules are imported, the engine is ready, the first token is there and all
programs are compiled; CPU seconds of all threads until the first token, which a busy machine
blurs less; how long loading and the rest of the build took; the peak of its memory.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time

from jaxengine import platform
from jaxengine.lab.bench.flags import engine_config, engine_settings


def main(argv: list[str]) -> int:
    began = float(argv[0])
    settings = engine_settings(argv[1:])
    platform.setup()
    from jaxengine.engine.core import EngineCore
    from jaxengine.sampling_params import SamplingParams
    from jaxengine.wire.messages import EngineRequest

    figures = {"import_s": time.time() - began}
    core = EngineCore(engine_config(settings))
    figures["ready_s"] = time.time() - began
    try:
        figures |= _build_phases(core.facts.info.get("seconds", ""))
        params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        prompt = list(range(16))
        core.add_request(
            EngineRequest(request_id="0", prompt_token_ids=prompt, params=params, arrival_time=0.0)
        )
        while core.has_work():
            if core.step() and "first_answer_s" not in figures:
                figures["first_answer_s"] = time.time() - began
                figures["first_answer_cpu_s"] = time.process_time()
        core.executor.wait_warm()
        figures["all_programs_s"] = time.time() - began
    finally:
        core.shutdown()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    figures["peak_rss_mib"] = peak / (2**20 if sys.platform == "darwin" else 2**10)
    print(json.dumps(figures))
    return 0


def _build_phases(text: str) -> dict[str, float]:
    """Of the engine's own account of its build: "1.2 load, 3.4 after"."""
    found = re.fullmatch(r"([\d.]+) load, ([\d.]+) after", text)
    return {} if found is None else {"load_s": float(found[1]), "compile_s": float(found[2])}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
