"""Flags of vLLM that this engine has by another name, does not need, or refuses, with the reason.

Flags that both have under one name are not listed. The command line and `EngineConfig.of` look
names up here, so that a command moved over from vLLM says what to do instead of "unknown option".
Names: the reference of `vllm serve`, 0.32.
"""

from __future__ import annotations

import functools
import logging
import os
from dataclasses import dataclass
from typing import Any, Literal

log = logging.getLogger(__name__)

Status = Literal["renamed", "not needed", "refused"]


@dataclass(frozen=True)
class Flag:
    """`ours`: the flag's name here (renamed). `reason`: what to do instead, or why nothing."""

    name: str
    status: Status
    ours: str = ""
    reason: str = ""
    takes_value: bool = True


def _renamed(name: str, ours: str) -> Flag:
    return Flag(name, "renamed", ours=ours)


def _switch(name: str, reason: str) -> Flag:
    return Flag(name, "not needed", reason=reason, takes_value=False)


def _unneeded(name: str, reason: str) -> Flag:
    return Flag(name, "not needed", reason=reason)


def _refused(name: str, reason: str) -> Flag:
    return Flag(name, "refused", reason=reason)


_LORA = "LoRA adapters are not served; merge one into the weights"
_TEXT_ONLY = "models take text only"
_NO_PLUGIN = "classes of others are not loaded"
_BUCKETS = (
    "the compiled shapes follow from --max-num-seqs and --max-num-batched-tokens; "
    "--warmup says when they are compiled"
)
_ROUTES = "the routes are always there"
_FILES = "the format is read from the files; leave it out"
_SPECULATIVE = "it is a key of the JSON of --speculative-config"
_OTHER_NODES = "ranks of other nodes have servers of their own: --data-parallel-hybrid-lb"

FLAGS: tuple[Flag, ...] = (
    _renamed("-tp", "--tensor-parallel-size"),
    _renamed("-pp", "--pipeline-parallel-size"),
    _renamed("-dp", "--data-parallel-size"),
    _renamed("-dpn", "--data-parallel-rank"),
    _renamed("-dpr", "--data-parallel-start-rank"),
    _renamed("-dpl", "--data-parallel-size-local"),
    _renamed("-ep", "--enable-expert-parallel"),
    _renamed("-q", "--quantization"),
    _renamed("-sc", "--speculative-config"),
    _renamed("--disable-uvicorn-access-log", "--disable-access-log"),
    _renamed("--uvicorn-log-level", "--log-level"),
    _switch("--trust-remote-code", "code of a checkpoint is never run"),
    _switch("--enforce-eager", "every step is a compiled program; --warmup lazy compiles least"),
    _switch("--enable-prompt-tokens-details", "usage always has the cached tokens"),
    _switch("--enable-request-id-headers", "X-Request-Id is always there"),
    _switch("--enable-server-load-tracking", "/load always counts"),
    _switch("--enable-sleep-mode", _ROUTES),
    _switch("--disable-log-requests", "texts of requests are never logged"),
    _switch("--disable-custom-all-reduce", "XLA chooses the collectives"),
    _switch("--use-tqdm-on-load", "loading shows its progress on a terminal"),
    _unneeded("--max-parallel-loading-workers", "weights are read ahead by threads"),
    _refused("--tokenizer-revision", "the tokenizer comes with --revision"),
    _unneeded("--code-revision", "code of a checkpoint is never run"),
    _refused("--tokenizer-mode", "there is one kind of tokenizer; leave it out"),
    _refused("--hf-token", "set the environment variable HF_TOKEN"),
    _refused("--hf-overrides", "edit config.json in the model's folder"),
    _refused("--task", "every model generates, and embeds"),
    _refused("--runner", "every model generates, and embeds"),
    _refused("--convert", "every model generates, and embeds"),
    _refused("--device", "set the environment variable JAX_PLATFORMS to cpu or cuda"),
    _refused("--skip-tokenizer-init", "the server needs a tokenizer; LLM(...) takes it"),
    _refused("--enable-prompt-embeds", "prompts are text or token ids"),
    _refused("--logits-processors", _NO_PLUGIN),
    _refused("--load-format", _FILES),
    _refused("--model-loader-extra-config", _FILES),
    _refused("--ignore-patterns", _FILES),
    _refused("--data-parallel-address", _OTHER_NODES),
    _refused("--data-parallel-rpc-port", _OTHER_NODES),
    _refused("--data-parallel-backend", _OTHER_NODES),
    _refused("--headless", "--node-rank above 0 makes a node that does not serve"),
    _refused("--distributed-executor-backend", "processes follow from the other flags"),
    _refused("--decode-context-parallel-size", "a context is not divided over devices"),
    _refused("--prefill-context-parallel-size", "a context is not divided over devices"),
    _refused("--enable-eplb", "--eplb-load FILE places experts by measured load, at the start"),
    _refused("--eplb-config", "--eplb-load FILE places experts by measured load, at the start"),
    _refused("--ubatch-size", "--enable-dbo always makes two microbatches"),
    _refused("--dp-sync-interval", "ranks that share experts agree before every step"),
    _refused("--kv-offloading-backend", "--kv-transfer-config names the tiers"),
    _refused("--swap-space", "--kv-offloading-size gives host memory to KV blocks"),
    _refused("--cpu-offload-gb", "weights stay on the device"),
    _refused("--offload-backend", "weights stay on the device"),
    _refused("--max-num-partial-prefills", "--long-prefill-token-threshold bounds a chunk"),
    _refused("--max-long-partial-prefills", "--long-prefill-token-threshold bounds a chunk"),
    _refused("--scheduler-cls", _NO_PLUGIN),
    _refused("--scheduler-reserve-full-isl", "--watermark keeps blocks free at admission"),
    _refused(
        "--disable-hybrid-kv-cache-manager", "layers with a window always have their own group"
    ),
    _refused("--spec-method", _SPECULATIVE),
    _refused("--spec-model", _SPECULATIVE),
    _refused("--spec-tokens", _SPECULATIVE),
    _refused("--compilation-config", _BUCKETS),
    _refused("--cudagraph-capture-sizes", _BUCKETS),
    _refused("--optimization-level", _BUCKETS),
    _refused("--performance-mode", _BUCKETS),
    _refused("--attention-config", "--attention-backend chooses"),
    _refused("--moe-backend", "--attention-backend xla takes every kernel off"),
    _refused("--kernel-config", "--attention-backend xla takes every kernel off"),
    _refused("--limit-mm-per-prompt", _TEXT_ONLY),
    _refused("--mm-processor-kwargs", _TEXT_ONLY),
    _refused("--mm-processor-cache-gb", _TEXT_ONLY),
    _refused("--mm-encoder-tp-mode", _TEXT_ONLY),
    _refused("--allowed-local-media-path", _TEXT_ONLY),
    _refused("--allowed-media-domains", _TEXT_ONLY),
    _refused("--enable-lora", _LORA),
    _refused("--lora-modules", _LORA),
    _refused("--max-loras", _LORA),
    _refused("--max-lora-rank", _LORA),
    _refused("--max-cpu-loras", _LORA),
    _refused("--lora-dtype", _LORA),
    _refused("--fully-sharded-loras", _LORA),
    _refused("--structured-outputs-config", "llguidance enforces every constraint"),
    _refused("--guided-decoding-backend", "llguidance enforces every constraint"),
    _refused("--tool-parser-plugin", _NO_PLUGIN),
    _refused("--chat-template-content-format", "the content's form follows from the template"),
    _refused("--response-role", "answers have the role assistant"),
    _refused("--middleware", _NO_PLUGIN),
    _refused("--enable-log-requests", "texts of requests are never logged"),
    _refused("--enable-log-outputs", "texts of answers are never logged"),
    _refused("--max-log-len", "texts of requests are never logged"),
    _refused("--log-config-file", "--log-level is the only setting of the log"),
    _refused("--custom-histogram-buckets", "the buckets are vLLM's defaults"),
    _refused("--show-hidden-metrics-for-version", "no metric is hidden"),
    _refused("--collect-detailed-traces", "--otlp-traces-endpoint has one span a request"),
    _refused("--h11-max-incomplete-event-size", "--max-request-bytes bounds a request"),
    _refused("--return-tokens-as-token-ids", "a request asks for it by a field of that name"),
    _refused("--disable-frontend-multiprocessing", "the engine always has its own process"),
    _refused("--grpc", "the server speaks HTTP only"),
    _refused("--profiler-config", "--profiler-dir names the folder of the traces"),
    _refused("--worker-cls", _NO_PLUGIN),
    _refused("--worker-extension-cls", _NO_PLUGIN),
    _refused("--additional-config", _NO_PLUGIN),
)
_NOT_NEEDED = "%s is not needed: %s"
_BY_NAME = {flag.name: flag for flag in FLAGS}


def find(word: str) -> Flag | None:
    """The entry of a flag in either spelling, `--trust_remote_code` too; None if it has none."""
    return _BY_NAME.get(word.replace("_", "-"))


def translate(argv: list[str]) -> list[str]:
    """A command line with vLLM's names turned into ours; what is not needed is left out, and said
    on the log. Raises ValueError for a flag that is refused, with the reason."""
    words: list[str] = []
    rest = iter(argv)
    for word in rest:
        name, equals, value = word.partition("=")
        flag = find(name) if name.startswith("-") else None
        if flag is None:
            words.append(word)
        elif flag.status == "renamed":
            words.append(flag.ours + equals + value)
        elif flag.status == "refused":
            raise ValueError(f"{flag.name} is not for this engine: {flag.reason}")
        else:
            log.warning(_NOT_NEEDED, flag.name, flag.reason)
            if flag.takes_value and not equals:
                next(rest, None)
    return words


# What to use instead of vLLM's environment variables that people set most.
_VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "kv_cache_memory_bytes",
    "VLLM_LOGGING_LEVEL": "log_level",
    "VLLM_HOST_IP": "master_addr",
    "VLLM_CACHE_ROOT": "compilation_cache_dir",
    "VLLM_ATTENTION_BACKEND": "attention_backend",
}
_OBEYED = ("VLLM_API_KEY",)  # by `server.keys`


@functools.cache
def note_vllm_environment() -> None:
    """Say once, in one line, which of vLLM's environment variables are set and do nothing here."""
    found = sorted(n for n in os.environ if n.startswith("VLLM_") and n not in _OBEYED)
    if found:
        named = [f"{n} (here {_VARIABLES[n]})" if n in _VARIABLES else n for n in found]
        log.warning(
            "these environment variables are vLLM's and do nothing here: %s", ", ".join(named)
        )


def keyword_problem(name: str) -> str:
    """Why `LLM(name=...)` is refused, for an error message; empty when nothing is known."""
    flag = find("--" + name)
    if flag is None or flag.status == "not needed":
        return ""
    return flag.reason if flag.status == "refused" else f"here it is {flag.ours[2:]}"


def without_unneeded(flat: dict[str, Any]) -> dict[str, Any]:
    """Keywords less those that are not needed, each of which is said on the log."""
    kept = {}
    for name, value in flat.items():
        flag = find("--" + name)
        if flag is not None and flag.status == "not needed":
            log.warning(_NOT_NEEDED, name, flag.reason)
        else:
            kept[name] = value
    return kept


def translate_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """The keys of a YAML file, treated as `translate` treats flags."""
    kept: dict[str, Any] = {}
    for name, value in without_unneeded(settings).items():
        flag = find("--" + name)
        if flag is None:
            kept[name] = value
        elif flag.status == "renamed":
            kept[flag.ours.removeprefix("--")] = value
        else:
            raise ValueError(f"{name} is not for this engine: {flag.reason}")
    return kept
