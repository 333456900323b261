"""`jaxengine bench serve`: load on a server, and what a client sees of it.

Any OpenAI server can be measured: requests carry standard fields only, unless flags ask for more.
TTFT: time to the first token. TPOT: time per output token after the first, a mean per request.
ITL: gaps between streamed pieces. E2EL: time to the last token. All in milliseconds.

The key of the server is taken from OPENAI_API_KEY.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from jaxengine.lab.bench import machine, results, summary
from jaxengine.lab.bench.acceptance import acceptance, acceptance_lines, read_drafts
from jaxengine.lab.bench.client import ENDPOINTS, Api, Trace, body_of, send
from jaxengine.lab.bench.datasets import BenchRequest
from jaxengine.lab.bench.flags import add_output, new_parser, not_negative, positive
from jaxengine.lab.bench.load import first_model, run_load, wait_ready
from jaxengine.lab.bench.local_server import serving
from jaxengine.lab.bench.workload import add_workload, make_requests, token_counter


def main(argv: list[str]) -> int:
    """Run the bench. Exit code 1 when a request failed. Raises ValueError for wrong flags."""
    args = parser().parse_args(argv)
    limits = summary.parse_goodput(args.goodput)
    percentiles = summary.parse_percentiles(args.metric_percentiles)
    shown = _metrics(args.percentile_metrics)
    count = token_counter(args.tokenizer)
    requests = make_requests(args, count)
    with _address(args, requests) as url:
        traces, seconds, drafts = asyncio.run(_drive(url, args, requests, count))
    figures = summary.summarize(traces, seconds, percentiles=percentiles, limits=limits)
    figures |= drafts
    figures["token_counts"] = dict(collections.Counter(t.counted for t in traces if not t.error))
    if args.max_concurrency is None and traces:
        late = [max(0.0, t.started - t.due) for t in traces]
        figures["client_late_p99_ms"] = 1e3 * float(np.percentile(late, 99))
    for line in summary.table(figures, shown) + acceptance_lines(figures):
        print(line)
    _save(args, figures, traces)
    return 0 if not figures["failed"] else 1


def parser() -> argparse.ArgumentParser:
    made = new_parser("serve", __doc__)
    group = made.add_argument_group("server")
    add = group.add_argument
    add("--backend", choices=sorted(ENDPOINTS), default="openai", help="completions or chat")
    add("--base-url", default=None, help="address; default: http://HOST:PORT")
    add("--host", default="127.0.0.1", help="of the server")
    add("--port", type=positive, default=8000, help="of the server")
    add("--endpoint", default=None, help="path; default: that of the backend")
    add("--model", default=None, help="default: the first that the server lists")
    add("--stub", action="store_true", help="start a server with canned tokens and measure that")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY"), help=argparse.SUPPRESS)
    add("--ready-check-timeout-sec", type=float, default=0.0, help="wait so long for the server")
    add("--header", nargs="+", default=[], help="NAME=VALUE, sent with every request")
    add("--timeout", type=float, default=600.0, help="seconds for one request")
    group = made.add_argument_group("requests")
    add = group.add_argument
    add("--ignore-eos", action="store_true", help="send ignore_eos (no standard field)")
    add("--temperature", type=float, default=0.0, help="of every request; -1 sends none")
    add("--top-p", type=float, default=None, help="of every request")
    add("--extra-body", type=_json_object, default={}, help="JSON object added to every request")
    add("--max-tokens-field", default="max_tokens", help="some servers want max_completion_tokens")
    add("--no-usage", action="store_true", help="do not ask for usage (stream_options)")
    add("--text-prompts", action="store_true", help="send words in place of token ids")
    add("--tokenizer", default=None, help="folder, tokenizer.json, .gguf, hub id or demo: counts "
        "tokens where the server sends no usage")  # fmt: skip
    add_workload(made)
    group = made.add_argument_group("load")
    add = group.add_argument
    add("--max-concurrency", type=positive, default=None, help="requests under way at most")
    add("--num-warmups", type=not_negative, default=0, help="requests before the measurement")
    group = made.add_argument_group("results")
    add = group.add_argument
    add("--goodput", nargs="+", default=[], help="limits in ms: ttft:200 tpot:50 e2el:5000")
    add("--percentile-metrics", default="ttft,tpot,itl,e2el", help="those to print")
    add("--metric-percentiles", default="50,90,99", help="percentiles to work out")
    add("--save-result", action="store_true", help="write a result file with a name of its own")
    add("--save-detailed", action="store_true", help="the file also has every request")
    add("--result-dir", default=".", help="where --save-result writes")
    add("--result-filename", default=None, help="name of that file")
    add_output(made)
    return made


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def _headers(words: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in words]
    if wrong := [name for name, equals, _ in pairs if not name or not equals]:
        raise ValueError(f"--header {wrong[0]}: give NAME=VALUE")
    return {name: value for name, _, value in pairs}


def _metrics(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in summary.METRICS:
            known = ", ".join(summary.METRICS)
            raise ValueError(f"--percentile-metrics {name}: there are {known}")
    return names


def _address(
    args: argparse.Namespace, requests: list[BenchRequest]
) -> contextlib.AbstractContextManager[str]:
    if args.stub:
        return _stub(requests)
    return contextlib.nullcontext(args.base_url or f"http://{args.host}:{args.port}")


@contextlib.contextmanager
def _stub(requests: list[BenchRequest]) -> Any:
    longest = max(r.prompt_len + r.output_len + 1 for r in requests)
    flags = ["--stub", "--max-model-len", str(max(longest, 512)), "--log-level", "warning"]
    with serving(flags) as (url, _):
        yield url


async def _drive(
    url: str,
    args: argparse.Namespace,
    requests: list[BenchRequest],
    count: Callable[[str], int] | None,
) -> tuple[list[Trace], float, dict[str, Any]]:
    """Traces, seconds, and the figures of speculative decoding where the server has some."""
    url = url.rstrip("/").removesuffix("/v1")  # as other tools want it
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    headers |= _headers(args.header)
    async with aiohttp.ClientSession(
        headers=headers,
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=args.timeout),
        read_bufsize=2**20,
    ) as session:
        try:
            if args.ready_check_timeout_sec > 0:
                await wait_ready(session, url, args.ready_check_timeout_sec)
            model = args.model or await first_model(session, url)
        except aiohttp.InvalidURL:
            raise ValueError(f"--base-url {url} is no address") from None
        except (aiohttp.ClientError, LookupError, TypeError, ValueError) as error:
            raise ValueError(f"{url} lists no model ({error}); give --model") from None
        api = _api(args, url, model, count)
        for request in requests[: args.num_warmups]:
            await send(session, api, body_of(api, request, args.seed), Trace(request.prompt_len))
        before = await read_drafts(session, url)
        traces, seconds = await run_load(
            session, api, requests, max_concurrency=args.max_concurrency, seed=args.seed
        )
        return traces, seconds, acceptance(before, await read_drafts(session, url))


def _api(args: argparse.Namespace, url: str, model: str, count: Callable[[str], int] | None) -> Api:
    extra = {"ignore_eos": True} if args.ignore_eos else {}
    if args.top_p is not None:
        extra["top_p"] = args.top_p
    return Api(
        backend=args.backend,
        url=url + (args.endpoint or ENDPOINTS[args.backend]),
        model=model,
        text_prompts=args.text_prompts,
        temperature=None if args.temperature < 0 else args.temperature,
        usage=not args.no_usage,
        max_tokens_field=args.max_tokens_field,
        extra=extra | args.extra_body,
        count=count,
    )


def _save(args: argparse.Namespace, figures: dict[str, Any], traces: list[Trace]) -> None:
    content = results.result("serve", args, machine.describe(), figures)
    if args.save_detailed:
        content["requests"] = [
            {"error": t.error, "input_len": t.prompt_len, "output_len": t.num_tokens}
            | (summary.latencies(t) if t.error is None else {})
            for t in traces
        ]
    if args.output_json:
        results.save(args.output_json, content)
    if args.save_result:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        name = args.result_filename or f"{args.backend}-{args.request_rate:g}qps-{stamp}.json"
        results.save(Path(args.result_dir) / name, content)
        print(f"written to {Path(args.result_dir) / name}")
