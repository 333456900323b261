"""The offline face over a small fake core: order, chat and BOS (B20), errors, Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers, processors

from jaxengine.config import EngineConfig
from jaxengine.front.llm import LLM, read_template
from jaxengine.sampling_params import SamplingParams
from jaxengine.text.tokenizer import Tokenizer
from jaxengine.validation import RequestError
from jaxengine.wire.messages import EngineOutput, EngineReady, EngineRequest, EngineStats

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}[assistant]{% endif %}"


def byte_tokenizer() -> Tokenizer:
    """Byte-level, adds its BOS to plain text, and its template writes one too."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tk = HFTokenizer(models.BPE(vocab=vocab, merges=[]))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(["<s>", "</s>"])
    tk.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tk.token_to_id("<s>"))]
    )
    return Tokenizer(
        tk=tk,
        bos_id=256,
        eos_ids=(257,),
        add_bos=True,
        vocab_size=258,
        chat_template=TEMPLATE,
        special_ids=frozenset({256, 257}),
        bos_token="<s>",
        eos_token="</s>",
    )


class EchoCore:
    """Answers with the prompt's ids after the first, one a step; two steps late."""

    def __init__(self) -> None:
        self.live: dict[str, tuple[EngineRequest, int]] = {}
        self.late: list[list[EngineOutput]] = []
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.steps = 0
        self.fail_at: int | None = None
        self.interrupt_at: int | None = None
        self.closed = 0

    def ready(self) -> EngineReady:
        return EngineReady(max_model_len=64, vocab_size=260)

    def add_request(self, request: EngineRequest) -> None:
        self.added.append(request)
        self.live[request.request_id] = (request, 0)

    def abort_requests(self, request_ids: list[str]) -> None:
        self.aborted += request_ids
        for request_id in request_ids:
            self.live.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self.live or any(self.late))

    def step(self) -> list[EngineOutput]:
        self.steps += 1
        if self.steps == self.fail_at:
            raise RuntimeError("device fell over")
        if self.steps == self.interrupt_at:
            os.kill(os.getpid(), signal.SIGINT)
        outputs = []
        for name, (request, done) in list(self.live.items()):
            ids = request.prompt_token_ids
            token = ids[1 + done % (len(ids) - 1)] if len(ids) > 1 else ids[0]
            assert request.params.max_tokens is not None
            last = done + 1 == request.params.max_tokens
            if token == 33:  # ids of "B": see test_error_of_one
                outputs.append(
                    EngineOutput(
                        request_id=name, new_token_ids=[], finish_reason="error", error="bad row"
                    )
                )
                del self.live[name]
                continue
            outputs.append(
                EngineOutput(
                    request_id=name,
                    new_token_ids=[token],
                    finish_reason="length" if last else None,
                )
            )
            if last:
                del self.live[name]
            else:
                self.live[name] = (request, done + 1)
        self.late.append(outputs)
        return self.late.pop(0) if len(self.late) > 2 else []

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.live), num_steps=self.steps)

    def utility(self, method: str, args: list[Any]) -> Any:
        return (method, args) == ("reset_prefix_cache", [])

    def shutdown(self) -> None:
        self.closed += 1


@pytest.fixture
def core() -> EchoCore:
    return EchoCore()


@pytest.fixture
def llm(core: EchoCore) -> LLM:
    return LLM.from_core(core, byte_tokenizer())


def _texts(outputs: list[Any]) -> list[str]:
    return [o.outputs[0].text for o in outputs]


def test_outputs_are_in_request_order(llm: LLM) -> None:
    prompts = ["aaa", "bbbb", "cc", "dddddd"]
    params = [SamplingParams(max_tokens=n) for n in (6, 1, 4, 2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert _texts(outputs) == ["aaaaaa", "b", "cccc", "dd"]
    assert [o.prompt for o in outputs] == prompts
    assert all(o.finished for o in outputs)
    assert len({o.request_id for o in outputs}) == 4


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        ("abc", 1),
        (["abc", "d"], 2),
        ([1, 2, 3], 1),
        ([[1, 2, 3], [4, 5]], 2),
        ({"prompt_token_ids": [1, 2]}, 1),
        ([{"prompt": "abc"}, "x", [1, 2]], 3),
        ([], 0),
    ],
)
def test_forms_of_prompts(llm: LLM, prompts: Any, count: int) -> None:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert len(outputs) == count
    assert all(len(o.outputs[0].token_ids) == 2 for o in outputs)


def test_defaults_of_the_model(core: EchoCore) -> None:
    llm = LLM.from_core(core, byte_tokenizer(), None, {"temperature": 0.6, "top_k": 7})
    assert llm.get_default_sampling_params() == SamplingParams(temperature=0.6, top_k=7)
    llm.generate("abc", use_tqdm=False)
    llm.generate("abc", SamplingParams(), use_tqdm=False)
    assert [r.params.temperature for r in core.added] == [0.6, 1.0]
    assert [r.params.top_k for r in core.added] == [7, 0]


@pytest.mark.parametrize("bad", [[], [1, 999], "x" * 200, {"nothing": 1}])
def test_one_bad_prompt_raises_before_anything_runs(llm: LLM, core: EchoCore, bad: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(["fine", bad], use_tqdm=False)
    assert core.added == [] and core.steps == 0
    assert _texts(llm.generate("ok", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ok"]


def test_lists_must_match(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 entries for 1"):
        llm.generate(["a"], [SamplingParams(), SamplingParams()], use_tqdm=False)
    with pytest.raises(RequestError, match="sampling_params"):
        llm.generate(["a"], {"temperature": 1}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="prompts"):
        llm.generate(5, use_tqdm=False)  # type: ignore[arg-type]


def test_b20_one_bos_everywhere(llm: LLM, core: EchoCore) -> None:
    messages = [{"role": "user", "content": "hi"}]
    [out] = llm.chat(messages, SamplingParams(max_tokens=1), use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    assert out.prompt == "<s>[user]hi[assistant]"
    assert out.prompt_token_ids == tokenizer.encode(out.prompt, add_special_tokens=False)
    assert out.prompt_token_ids.count(256) == 1
    [plain] = llm.generate("hi", SamplingParams(max_tokens=1), use_tqdm=False)
    assert plain.prompt_token_ids == [256, *tokenizer.encode("hi", add_special_tokens=False)]
    [written] = llm.generate("<s>hi", SamplingParams(max_tokens=1), use_tqdm=False)
    assert written.prompt_token_ids == plain.prompt_token_ids


def test_chat_forms(llm: LLM) -> None:
    one = [{"role": "user", "content": "a"}]
    two = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    outputs = llm.chat([one, two], SamplingParams(max_tokens=1), use_tqdm=False)
    assert [o.prompt for o in outputs] == [
        "<s>[user]a[assistant]",
        "<s>[user]b[assistant]c[assistant]",
    ]
    [out] = llm.chat(two, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    assert out.prompt == "<s>[user]b[assistant]c"
    [own] = llm.chat(one, use_tqdm=False, chat_template="{{ messages[0].content }}!")
    assert own.prompt == "a!"
    with pytest.raises(RequestError, match="add_generation_prompt"):
        llm.chat(two, use_tqdm=False, continue_final_message=True)
    with pytest.raises(RequestError, match="messages"):
        llm.chat([[]], use_tqdm=False)


def test_default_template_arguments(core: EchoCore) -> None:
    """F55: as the server does; what a call says wins."""
    config = EngineConfig.of(default_chat_template_kwargs={"mood": "calm", "tone": "low"})
    llm = LLM.from_core(core, byte_tokenizer(), config)
    said: dict[str, Any] = {"chat_template": "{{ mood }} {{ tone }}{{ messages[0].content }}"}
    [out] = llm.chat([{"role": "user", "content": "!"}], use_tqdm=False, **said)
    assert out.prompt == "calm low!"
    said["chat_template_kwargs"] = {"tone": "high"}
    [out] = llm.chat([{"role": "user", "content": "!"}], use_tqdm=False, **said)
    assert out.prompt == "calm high!"


def test_keys_of_a_prompt(llm: LLM, core: EchoCore) -> None:
    """A6, A7: obeyed, or refused by name."""
    llm.generate({"prompt": "abc", "cache_salt": "mine"}, use_tqdm=False)
    assert core.added[-1].cache_salt == "mine"
    llm.generate({"prompt": "abc", "multi_modal_data": None}, use_tqdm=False)
    for name, value in (
        ("multi_modal_data", {"image": 1}),
        ("prompt_embeds", [0.5]),
        ("encoder_prompt", "x"),
        ("cache_salt", 5),
        ("nobody_knows", 1),
    ):
        with pytest.raises(RequestError, match=name):
            llm.generate({"prompt": "abc", name: value}, use_tqdm=False)


def test_read_template(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ x }}")
    assert read_template(str(path)) == "{{ x }}"
    assert read_template("{{ y }}") == "{{ y }}"
    with pytest.raises(RequestError, match="missing.jinja"):
        read_template(str(tmp_path / "missing.jinja"))


def test_stop_strings_abort_in_the_engine(llm: LLM, core: EchoCore) -> None:
    [out] = llm.generate("xyz", SamplingParams(max_tokens=40, stop="zx"), use_tqdm=False)
    assert (out.outputs[0].text, out.outputs[0].stop_reason) == ("xy", "zx")
    assert core.aborted == [out.request_id]


def test_n_completions(llm: LLM) -> None:
    [out] = llm.generate("ab", SamplingParams(n=3, max_tokens=2), use_tqdm=False)
    assert [c.text for c in out.outputs] == ["ab"] * 3


def test_error_of_one(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    bad = [1, 33]
    outputs = llm.generate(["ok", bad], SamplingParams(max_tokens=2), use_tqdm=False)
    assert _texts(outputs) == ["ok", ""]
    assert outputs[1].error == "bad row"
    assert "bad row" in caplog.text


def test_engine_failure_is_raised_and_leaves_nothing(llm: LLM, core: EchoCore) -> None:
    core.fail_at = 3
    with pytest.raises(RuntimeError, match="fell over"):
        llm.generate(["abc", "def"], use_tqdm=False)
    assert not core.has_work()
    assert _texts(llm.generate("ok", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ok"]


def test_ctrl_c_aborts_the_batch_and_the_llm_lives(llm: LLM, core: EchoCore) -> None:
    # a shell has its background jobs ignore it
    signal.signal(signal.SIGINT, signal.default_int_handler)
    core.interrupt_at = 5
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc", "def"], SamplingParams(max_tokens=40), use_tqdm=False)
    assert sorted(core.aborted) == ["0", "1"]
    assert not core.has_work()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert _texts(llm.generate("ok", SamplingParams(max_tokens=2), use_tqdm=False)) == ["ok"]


def test_lost_requests_do_not_spin(llm: LLM, core: EchoCore) -> None:
    core.add_request = lambda request: None  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="lost 1"):
        llm.generate("abc", use_tqdm=False)


def test_in_another_thread(llm: LLM) -> None:
    texts: list[str] = []
    thread = threading.Thread(
        target=lambda: texts.extend(
            _texts(llm.generate("ok", SamplingParams(max_tokens=2), use_tqdm=False))
        )
    )
    thread.start()
    thread.join(20)
    assert texts == ["ok"]


def test_without_a_tokenizer(core: EchoCore) -> None:
    llm = LLM.from_core(core)
    [out] = llm.generate([1, 2, 3], SamplingParams(max_tokens=2), use_tqdm=False)
    assert (out.outputs[0].token_ids, out.outputs[0].text) == ([2, 3], "")
    with pytest.raises(RuntimeError, match="skip_tokenizer_init"):
        llm.get_tokenizer()
    with pytest.raises(RequestError, match="token ids"):
        llm.generate("text", use_tqdm=False)


def test_utilities_and_close(core: EchoCore) -> None:
    with LLM.from_core(core, byte_tokenizer()) as llm:
        assert llm.reset_prefix_cache() is True
        assert llm.get_metrics()["num_steps"] == 0
    llm.close()
    assert core.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", use_tqdm=False)


def test_progress_bar(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["abc", "d"], SamplingParams(max_tokens=2))
    assert "2/2" in capsys.readouterr().err


def test_import_needs_no_server_and_no_device() -> None:
    code = (
        "import sys, jaxengine.front.llm, jaxengine.text.output_processor;"
        "print([m for m in ('zmq', 'fastapi', 'jax') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_unknown_setting() -> None:
    with pytest.raises(TypeError, match="no_such_setting"):
        LLM("demo", no_such_setting=1)


def test_stream_gives_what_is_new(llm: LLM, core: EchoCore) -> None:
    [whole] = llm.generate(["abcdef"], SamplingParams(max_tokens=5))
    parts = list(llm.stream("abcdef", SamplingParams(max_tokens=5)))
    assert len(parts) > 2
    assert "".join(part.outputs[0].text for part in parts) == whole.outputs[0].text
    assert [part.finished for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].outputs[0].finish_reason == "length"


def test_leaving_a_stream_ends_the_request(llm: LLM, core: EchoCore) -> None:
    stream = llm.stream("abcdef", SamplingParams(max_tokens=50))
    next(stream)
    stream.close()
    assert core.aborted == [core.added[-1].request_id] and not core.has_work()
    assert llm.generate(["xyz"], SamplingParams(max_tokens=2))[0].finished
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.stream("abc")
