"""Settings are checked where they are made: every door refuses the same values."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from typing import Any

import numpy as np
import pytest

from jaxengine import LLM
from jaxengine.config import PARTS, CacheConfig, EngineConfig, ServerConfig
from jaxengine.lab.bench.flags import engine_config
from jaxengine.server.app import build_app
from jaxengine.settings.check import SettingError, in_flags

FIELDS = [(part, field) for part in PARTS.values() for field in dataclasses.fields(part)]
NAMES = [field.name for _, field in FIELDS]


@pytest.mark.parametrize("name", NAMES)
def test_none_is_the_default(name: str) -> None:
    """vLLM's wrappers pass None for what they leave to the engine."""
    assert EngineConfig.of(**{name: None}) == EngineConfig.of()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "value", [object(), b"x", math.nan, [1]], ids=["object", "bytes", "nan", "list"]
)
def test_a_value_of_no_such_type_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be") as refused:
        EngineConfig.of(**{name: value})
    assert isinstance(refused.value, SettingError) and refused.value.field == name


WRONG = [
    ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype must be one of auto, fp8, fp8_e4m3"),
    ({"quantization": "awq"}, "quantization must be int8, got 'awq'"),
    ({"attention_backend": "FLASH_ATTN"}, "attention_backend must be one of auto, mosaic, xla"),
    ({"gpu_memory_utilization": 7.5}, "gpu_memory_utilization must be above 0 and at most 1"),
    ({"gpu_memory_utilization": math.inf}, "gpu_memory_utilization must be a finite number"),
    ({"enable_prefix_caching": "false"}, "enable_prefix_caching must be true or false"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be true or false, got 1"),
    ({"max_num_seqs": True}, "max_num_seqs must be a whole number, got True"),
    ({"max_num_seqs": 2.0}, "max_num_seqs must be a whole number, got 2.0"),
    ({"max_model_len": "long"}, "max_model_len must be a whole number, got 'long'"),
    ({"block_size": 0}, "block_size must be at least 1, got 0"),
    ({"max_num_queued_reqs": -1}, "max_num_queued_reqs must not be negative, got -1"),
    ({"port": 70000}, "port must be between 0 and 65535, got 70000"),
    ({"max_logprobs": -2}, "max_logprobs must be at least -1, got -2"),
    ({"watermark": 1}, "watermark must be from 0 to below 1"),
    ({"kv_cache_metrics_sample": 0}, "kv_cache_metrics_sample must be above 0 and at most 1"),
    ({"kv_offloading_size": 0}, "kv_offloading_size must be above 0, got 0"),
    ({"api_key": ""}, "api_key must not be empty"),
    ({"admin_api_key_file": ""}, "admin_api_key_file must not be empty"),
    ({"api_key": "a", "api_key_file": "b"}, "api_key and api_key_file are two ways"),
    ({"served_model_name": ""}, "served_model_name must not be empty"),
    ({"root_path": "llm"}, "root_path must begin with /"),
    ({"allowed_origins": "*"}, "allowed_origins must be a list of strings"),
    ({"enable_auto_tool_choice": True}, "enable_auto_tool_choice needs tool_call_parser"),
    ({"retry_aborted_requests": True}, "retry_aborted_requests needs enable_fault_tolerance"),
    ({"node_rank": 1}, "node_rank 1 is not one of the 1 nodes"),
    ({"data_parallel_rank": 3}, "--data-parallel-rank 3 is not one of the 1 ranks"),
    ({"data_parallel_size": 0}, "data_parallel_size must be at least 1"),
    ({"pooler_config": "{"}, "pooler_config is not JSON"),
    ({"override_generation_config": {"temperature": 9}}, "override_generation_config: temperature"),
    ({"kv_transfer_config": {"kv_connector": "Nope"}}, "Nope"),
    ({"kv_events_config": "[]"}, "kv_events_config must be a JSON object"),
    ({"speculative_config": {"method": "magic"}}, "speculative_config.method must be one of"),
    ({"fault_tolerance_config": "[1]"}, "fault_tolerance_config"),
    ({"inject_faults": "{"}, "inject_faults"),
    ({"otlp_traces_endpoint": "nowhere"}, "http"),
    ({"default_chat_template_kwargs": "[1]"}, "must be a JSON object"),
]


@pytest.mark.parametrize(("settings", "sentence"), WRONG, ids=[str(w[0]) for w in WRONG])
def test_wrong_values(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as refused:
        EngineConfig.of(**settings)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    "door",
    [
        lambda **given: LLM("/nowhere", **given),
        lambda **given: EngineConfig(cache=CacheConfig(**given)),
        lambda **given: dataclasses.replace(EngineConfig(), cache=CacheConfig(**given)),
        lambda **given: engine_config(given),
    ],
    ids=["LLM", "EngineConfig", "replace", "bench"],
)
def test_every_door_refuses(door: Any) -> None:
    """Before a file is looked for or a process is started."""
    with pytest.raises(ValueError, match="must be one of auto, fp8, fp8_e4m3, got 'bfloat16'"):
        door(kv_cache_dtype="bfloat16")


def test_an_empty_key_opens_no_server() -> None:
    """`api_key=$UNSET` in a deployment's command."""
    with pytest.raises(ValueError, match="api_key must not be empty"):
        build_app(None, EngineConfig(server=ServerConfig(api_key="")))


def test_values_of_a_near_type_are_taken() -> None:
    config = EngineConfig.of(
        model=pathlib.Path("/m"),
        max_num_seqs=np.int64(7),
        gpu_memory_utilization=1,
        allowed_origins=("http://a",),
    )
    assert config.model.model == "/m" and type(config.model.model) is str
    assert type(config.scheduler.max_num_seqs) is int
    assert config.cache.gpu_memory_utilization == 1.0
    assert config.server.allowed_origins == ["http://a"]
    assert EngineConfig.of(max_model_len=-1).model.max_model_len is None


def test_messages_in_the_words_of_flags() -> None:
    names = ["block_size", "port", "max_num_seqs", "api_key"]
    assert in_flags("block_size must be", names) == "--block-size must be"
    assert in_flags("port must be below", names) == "--port must be below"
    assert in_flags("the port needs max_num_seqs", names) == "the port needs --max-num-seqs"
    assert in_flags("x.block_size and --block-size", names) == "x.block_size and --block-size"
