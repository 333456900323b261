"""Small tokenizers, built in memory: byte-level, and SentencePiece-like with byte fallback."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

from jaxengine.sampling_params import SamplingParams
from jaxengine.text.output_processor import OutputProcessor
from jaxengine.text.outputs import RequestOutput
from jaxengine.text.processor import InputProcessor
from jaxengine.validation import Limits
from jaxengine.wire.messages import EngineOutput

BYTE_VOCAB = 300  # logits wider than the tokenizer


@dataclass
class ToyTokenizer:
    tk: HFTokenizer
    eos_ids: tuple[int, ...]
    bos_id: int | None = None
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        return int(self.tk.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = list(self.tk.encode(text, add_special_tokens=False).ids)
        if add_special_tokens and self.bos_id is not None:
            return [self.bos_id, *ids]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self.tk.decode(ids, skip_special_tokens=skip_special_tokens))


def _alphabet() -> dict[int, str]:
    """Byte -> character, read off the encoder itself for characters that use every legal byte."""
    encoder = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found: dict[int, str] = {}
    for point in [*range(0x800), *range(0x800, 0xD800, 0x40), *range(0x10000, 0x110000, 0x1000)]:
        [(text, _)] = encoder.pre_tokenize_str(chr(point))
        found.update(zip(chr(point).encode(), text, strict=True))
    return found


_CHARS = _alphabet()


def byte_char(byte: int) -> str:
    """The byte-level alphabet's character for a byte."""
    return _CHARS[byte]


def byte_tokenizer(*, merges: tuple[tuple[str, str], ...] = ()) -> ToyTokenizer:
    """Every byte is one token (ids 0..255, in the alphabet's order), then merges, then specials."""
    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for a, b in merges:
        vocab[a + b] = len(vocab)
    tk = HFTokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tk.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tk.decoder = decoders.ByteLevel()
    tk.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    bos, eos = tk.token_to_id("<s>"), tk.token_to_id("</s>")
    return ToyTokenizer(tk, (eos,), bos)


def sp_tokenizer() -> ToyTokenizer:
    """Metaspace and byte fallback, as Llama 2."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", "▁▁", "▁▁▁▁", "▁Hello", "▁world", "Hello", ",", ".", "x", "y", "▁x", "é"]
    tk = HFTokenizer(
        models.BPE(
            vocab={p: i for i, p in enumerate(pieces)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tk.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tk.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tk.add_special_tokens(["<s>", "</s>"])
    return ToyTokenizer(tk, (2,), 1)


def run(
    tokenizer: ToyTokenizer,
    prompt: str | list[int],
    steps: list[list[int]],
    params: SamplingParams,
    *,
    kind: str = "delta",
    finish: str | None = "length",
    stop_reason: int | None = None,
) -> tuple[list[RequestOutput], list[str]]:
    """Feed the tokens of each step through the processors, the last step with `finish`; stops
    when the request has ended. Returns the outputs and the ids to abort."""
    inputs = InputProcessor(tokenizer, Limits(4096, BYTE_VOCAB), {})  # type: ignore[arg-type]
    processor = OutputProcessor(tokenizer)  # type: ignore[arg-type]
    processor.add(inputs.process("r", prompt, params), kind)  # type: ignore[arg-type]
    seen: list[RequestOutput] = []
    aborted: list[str] = []
    for at, ids in enumerate(steps):
        last = at == len(steps) - 1
        output = EngineOutput(
            request_id="r",
            new_token_ids=list(ids),
            finish_reason=finish if last else None,
            stop_reason=stop_reason if last else None,
        )
        results, abort = processor.process([output])
        seen += results
        aborted += abort
        if seen and seen[-1].finished:
            assert len(processor) == 0
            break
    return seen, aborted


def joined(outputs: list[RequestOutput]) -> str:
    return "".join(c.text for o in outputs for c in o.outputs)
