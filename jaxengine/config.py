"""Every setting, once: the CLI flags, YAML keys and Python keywords are made from these fields.

Names and meanings follow vLLM's where the meaning is the same. A field's docstring (the string
under it) is its help text. Nothing here imports JAX.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass, field
from typing import Any, Literal

from jaxengine.vllm_names import keyword_problem, without_unneeded

log = logging.getLogger(__name__)

ToolCallParser = Literal[
    "gpt-oss",
    "hermes",
    "llama3_json",
    "mistral",
    "openai",
    "pythonic",
    "qwen3",
    "qwen3_coder",
    "qwen3_xml",
]
ReasoningParser = Literal["deepseek_r1", "gpt-oss", "openai_gptoss", "qwen3"]
HARMONY_PARSERS = ("gpt-oss", "openai", "openai_gptoss")  # of either kind: one format has both


@dataclass(frozen=True)
class ModelConfig:
    model: str = "demo"
    """Hugging Face folder, .gguf file, hub id, or "demo" (SmolLM2-135M-Instruct)."""
    tokenizer: str | None = None
    """Folder, tokenizer.json or .gguf file; default: with the model."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of weights and activations; auto takes the checkpoint's (GGUF: the platform's best)."""
    pooler_config: str | dict[str, Any] | None = None
    """JSON for /v1/embeddings: pooling_type (LAST | MEAN), normalize (true)."""
    quantization: Literal["int8"] | None = None
    """int8: weights and activations in 8 bits where that is faster (CPU)."""
    max_model_len: int | None = None
    """Longest sequence, prompt and output, in tokens: 32768, 32K or 32k (32000); default, and with
    auto or -1: the model's, within memory."""
    seed: int = 0
    """Base of the random keys of requests without a seed."""
    max_logprobs: int = 20
    """Most log-probabilities a request may ask for at one position; -1 = the whole vocabulary."""
    logprobs_mode: Literal["raw_logprobs"] = "raw_logprobs"
    """Log-probabilities are of the model's own logits, before penalties and temperature, within
    what a grammar allows."""
    generation_config: str = "auto"
    """auto: sampling defaults of the model's generation_config.json; engine (or vllm): ours; else
    the folder whose generation_config.json is read."""
    override_generation_config: str | dict[str, Any] | None = None
    """JSON: sampling defaults over those: temperature, top_p, top_k, min_p, repetition_penalty,
    max_new_tokens."""
    chat_template: str | None = None
    """File (or text) of a Jinja chat template that replaces the model's."""
    trust_request_chat_template: bool = False
    """Accept a chat_template in requests (rendered in the sandbox all the same)."""
    download_dir: str | None = None
    """Where hub downloads are kept."""

    def __post_init__(self) -> None:
        """vLLM's length -1 is "not set" here."""
        if self.max_model_len == -1:
            object.__setattr__(self, "max_model_len", None)


@dataclass(frozen=True)
class CacheConfig:
    block_size: int | None = None
    """Tokens in one KV block; default 16, or 64 with the Hopper kernels (one copy a tile)."""
    num_gpu_blocks_override: int | None = None
    """Exact number of KV blocks, instead of what memory allows."""
    kv_cache_memory_bytes: int | None = None
    """Bytes for the KV pool of one device, such as 2G; default: gpu_memory_utilization on GPU,
    384 MiB on CPU."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3"] = "auto"
    """auto: the model's type; fp8 (e4m3, scale 1): half of bfloat16's memory, less exact."""
    gpu_memory_utilization: float = 0.92
    """Share of device memory for weights, activations and KV."""
    enable_prefix_caching: bool = True
    """Reuse KV blocks of equal prefixes."""
    prefix_caching_hash_algo: Literal["sha256", "xxhash"] = "sha256"
    """Hash of the block chain."""
    kv_transfer_config: str | dict[str, Any] | None = None
    """JSON: where KV blocks go beyond device memory, or which engines share them: kv_connector
    (OffloadingConnector or P2PConnector), kv_role, kv_connector_extra_config."""
    kv_offloading_size: float | None = None
    """GiB of host memory for KV blocks; short for an OffloadingConnector with that only."""
    kv_events_config: str | dict[str, Any] | None = None
    """JSON: enable, endpoint, replay_endpoint, buffer_steps, hwm, max_queue_size, topic of
    the events of the prefix cache, published over ZMQ."""


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int | None = None
    """Most sequences in one step (of each attention group); default 64 on CPU, 256 on GPU."""
    max_num_batched_tokens: int | None = None
    """Token budget of one step (of each attention group), such as 8192 or 8K; default 1024 on CPU,
    8192 on GPU."""
    enable_chunked_prefill: bool = True
    """Split long prompts over steps, beside running decodes."""
    long_prefill_token_threshold: int = 0
    """Longest chunk of one prompt while others wait; 0 = no limit."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of admission."""
    async_scheduling: bool = True
    """Plan the next step while the device works on this one."""
    watermark: float = 0.0
    """Share of KV blocks kept free when new requests are admitted."""
    speculative_config: str | dict[str, Any] | None = None
    """JSON: method (ngram | suffix | eagle | draft_model | mtp), model, num_speculative_tokens or
    num_speculative_tokens_per_batch_size ([[first, last, K], ...]), prompt_lookup_max,
    prompt_lookup_min, adaptive, and what docs/speculation.md lists."""
    max_num_queued_reqs: int | None = None
    """Refuse (503) above so many waiting requests; one of n answers counts n times."""
    max_num_queued_tokens: int | None = None
    """Refuse (503) above so many waiting prompt tokens."""


@dataclass(frozen=True)
class ParallelConfig:
    tensor_parallel_size: int = 1
    """Devices that share every layer: heads, FFN columns and vocabulary are divided."""
    pipeline_parallel_size: int = 1
    """Stages of layers on devices of their own; the scheduler keeps a step in each."""
    attention_data_parallel_size: int = 1
    """Groups of devices that attend to different requests, each with its own KV pool, inside one
    engine; experts are shared by all with enable_expert_parallel."""
    enable_expert_parallel: bool = False
    """Divide experts, not their columns, over all devices."""
    all2all_backend: Literal["auto", "allgather", "all_to_all", "ragged"] = "auto"
    """How tokens travel to their experts; auto: by size."""
    num_redundant_experts: int = 0
    """Copies of busy experts, beside all experts, with enable_expert_parallel."""
    eplb_load: str | None = None
    """File of measured expert loads (record_expert_load) that places experts and their copies."""
    record_expert_load: str | None = None
    """Count the tokens of every expert while serving, and write them to this file."""
    nnodes: int = 1
    """Processes (on one or several machines) that together are one engine."""
    node_rank: int = 0
    """This process; 0 serves and drives, the others follow."""
    master_addr: str = "127.0.0.1"
    """Where node 0 can be reached."""
    master_port: int = 29500
    """Port of node 0 for jax.distributed; the next one carries the steps."""
    enable_dbo: bool = False
    """Dual-batch overlap: two microbatches out of phase hide the experts' communication."""
    dbo_decode_token_threshold: int = 32
    """Fewest tokens of a decode-only step that is split."""
    dbo_prefill_token_threshold: int = 512
    """Fewest tokens of a step with prefill that is split."""


@dataclass(frozen=True)
class DataParallelConfig:
    data_parallel_size: int = 1
    """Engines, each with its own process and KV pool, behind one endpoint."""
    data_parallel_rank: int | None = None
    """This server is one rank of several; a balancer outside chooses among them."""
    data_parallel_external_lb: bool = False
    """A balancer outside chooses the rank: every rank has its own endpoint."""
    data_parallel_hybrid_lb: bool = False
    """Every node has an endpoint and balances over its own ranks."""
    data_parallel_size_local: int | None = None
    """Ranks on this node (hybrid mode); default: all."""
    data_parallel_start_rank: int = 0
    """First rank on this node (hybrid mode)."""
    data_parallel_affinity: Literal["none", "prefix", "session"] = "none"
    """prefix: equal prompt beginnings go to the same rank while loads allow; session: requests
    with equal `user` or X-Session-Id do."""


@dataclass(frozen=True)
class FaultConfig:
    enable_fault_tolerance: bool = False
    """A failed engine does not end the server: its requests end, others go on, and it recovers
    by order. The device lives in a worker process of its own."""
    fault_tolerance_config: str | dict[str, Any] | None = None
    """JSON: engine_recovery_timeout_sec (120), auto_recover (never | retry | respawn),
    step_timeout_sec (60: of one step, and of an engine's silence)."""
    retry_aborted_requests: bool = False
    """Replay greedy and seeded requests of a failed rank on another; the client sees no gap."""
    inject_faults: str | None = None
    """JSON list of faults for drills: raise, oom, hang, kill, exit, slow at a step of a rank."""

    def __post_init__(self) -> None:
        """Settings of fault tolerance ask for it: they would do nothing without."""
        for name in ("fault_tolerance_config", "inject_faults"):
            if getattr(self, name) and not self.enable_fault_tolerance:
                log.warning("%s turns enable_fault_tolerance on", name)
                object.__setattr__(self, "enable_fault_tolerance", True)


@dataclass(frozen=True)
class RunnerConfig:
    warmup: Literal["auto", "full", "background", "first", "greedy", "lazy"] = "auto"
    """full: compile every bucket before serving; background: serve at once and compile beside;
    first: what one short prompt needs; greedy: the same at temperature 0; lazy: compile on first
    use; auto: background on CPU, full on GPU."""
    attention_backend: Literal["auto", "mosaic", "xla"] = "auto"
    """mosaic: the Pallas kernels for Hopper, or an error; xla: never; auto: the kernels where the
    device and the model's shapes allow, else XLA with one log line that says why."""
    compilation_cache_dir: str | None = None
    """Persistent XLA cache; default ~/.cache/jaxengine/xla; "off" disables."""


@dataclass(frozen=True)
class ServerConfig:
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 8000
    """Port to listen on."""
    uds: str | None = None
    """Listen on this Unix socket instead."""
    root_path: str = ""
    """Path under which a proxy shows the server, such as /llm."""
    ssl_keyfile: str | None = None
    """PEM file of the TLS key; with ssl_certfile the server speaks https."""
    ssl_certfile: str | None = None
    """PEM file of the TLS certificate."""
    ssl_ca_certs: str | None = None
    """PEM file of the authorities whose client certificates are accepted."""
    ssl_cert_reqs: Literal[0, 1, 2] = 0
    """Client certificates: 0 none, 1 checked if sent, 2 needed."""
    api_key: str | None = None
    """Key that clients must send as a bearer token. `ps` shows it: prefer api_key_file, or the
    environment variable JAXENGINE_API_KEY (or VLLM_API_KEY)."""
    api_key_file: str | None = None
    """File whose first line is the key that clients must send."""
    admin_api_key: str | None = None
    """Key for the admin routes (and all others); default: api_key opens these too."""
    admin_api_key_file: str | None = None
    """File whose first line is the admin key; else the environment variable
    JAXENGINE_ADMIN_API_KEY."""
    api_server_count: int = 1
    """Processes that answer HTTP, tokenize and detokenize before one set of engines."""
    served_model_name: str | None = None
    """Name in /v1/models and responses; default: the model argument."""
    allowed_hosts: list[str] = field(default_factory=list)
    """Names that a server without a key on a loopback address answers to, beside the local ones,
    when a proxy on the same machine passes them on; '*': every name."""
    allowed_origins: list[str] = field(default_factory=list)
    """CORS origins; none: no CORS headers."""
    allowed_methods: list[str] = field(default_factory=lambda: ["*"])
    """CORS methods."""
    allowed_headers: list[str] = field(default_factory=lambda: ["*"])
    """CORS headers."""
    allow_credentials: bool = False
    """CORS: browsers may send cookies."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests get to finish on SIGTERM."""
    max_request_bytes: int = 32 * 1024 * 1024
    """Largest request body; larger is 413."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Log level."""
    disable_log_stats: bool = False
    """No periodic status line."""
    disable_access_log: bool = False
    """No log line for each HTTP request."""
    metrics_port: int | None = None
    """Port of its own for /metrics and /health alone, which ask for no key there: for scrapers
    that cannot send one."""
    metrics_compat: Literal["none", "vllm"] = "none"
    """vllm: export the metrics under vllm: too."""
    kv_cache_metrics: bool = False
    """Time how long KV blocks stay, idle and come to be used again (kv_block_* histograms)."""
    kv_cache_metrics_sample: float = 0.01
    """Share of the blocks that are timed, above 0 and at most 1."""
    enable_mfu_metrics: bool = False
    """Estimate FLOPs and bytes of every step (estimated_*_per_gpu_total)."""
    enable_auto_tool_choice: bool = False
    """Find the model's own calls of tools in its answers (tool_choice "auto"), as
    tool_call_parser reads them."""
    tool_call_parser: ToolCallParser | None = None
    """How the model writes calls of tools."""
    reasoning_parser: ReasoningParser | None = None
    """How the model marks its reasoning, which then goes out apart, as reasoning_content."""
    default_chat_template_kwargs: str | dict[str, Any] | None = None
    """JSON: variables of the chat template that requests do not set (chat_template_kwargs)."""
    exclude_tools_when_tool_choice_none: bool = False
    """Leave the tools out of the prompt when tool_choice is none."""
    enable_force_include_usage: bool = False
    """Every chunk of a stream has the usage so far, and its end the whole, whether stream_options
    asks for it or not."""
    stream_interval: int = 1
    """Tokens in a chunk of a stream; the first comes at once all the same. More: fewer, larger
    writes, for many streams on few cores."""
    sse_keep_alive_interval: float = 0.0
    """Seconds of silence after which a stream gets a comment, for proxies that cut silent
    connections; 0: never. A failure after that time comes as an event, behind the status 200."""
    enable_tokenizer_info_endpoint: bool = False
    """Serve GET /tokenizer_info: the tokenizer's end tokens, added tokens and chat template."""
    disable_fastapi_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
    otlp_traces_endpoint: str | None = None
    """URL of an OpenTelemetry collector (OTLP over HTTP) for a span of every request; needs the
    extra otel."""
    profiler_dir: str | None = None
    """Folder for the traces of /start_profile; without it there is no profiling."""


@dataclass(frozen=True)
class EngineConfig:
    """All settings of an engine and its server. None means the default of a setting; a value that
    cannot be used raises ValueError naming it. `of` spreads flat keywords over the parts:

    >>> config = EngineConfig.of(model="demo", max_model_len=2048, enable_prefix_caching=False)
    >>> config.model.max_model_len, config.cache.enable_prefix_caching
    (2048, False)
    >>> EngineConfig.of(max_model_length=2048)
    Traceback (most recent call last):
    TypeError: unknown setting 'max_model_length'
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    fault: FaultConfig = field(default_factory=FaultConfig)
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def __post_init__(self) -> None:
        from jaxengine.settings.check import check_config

        check_config(self)

    @staticmethod
    def of(**flat: Any) -> EngineConfig:
        """Build from flat keywords. Raises TypeError for an unknown name, with the reason if vLLM
        has it; of vLLM's those that are not needed are left out, with a line on the log."""
        flat = without_unneeded(flat)
        parts: dict[str, Any] = {}
        for name, kind in PARTS.items():
            names = {f.name for f in dataclasses.fields(kind)}
            parts[name] = kind(**{k: flat.pop(k) for k in list(flat) if k in names})
        if flat:
            name = sorted(flat)[0]
            why = keyword_problem(name)
            raise TypeError(f"unknown setting {name!r}" + (f": {why}" if why else ""))
        return EngineConfig(**parts)


PARTS: dict[str, Any] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "data_parallel": DataParallelConfig,
    "fault": FaultConfig,
    "runner": RunnerConfig,
    "server": ServerConfig,
}


def template_kwargs(given: str | dict[str, Any] | None) -> dict[str, Any]:
    """default_chat_template_kwargs as a mapping. Raises ValueError naming the flag."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ValueError(f"--default-chat-template-kwargs is not valid JSON: {error}") from None
    if given is not None and not isinstance(given, dict):
        raise ValueError("--default-chat-template-kwargs must be a JSON object")
    return given or {}
