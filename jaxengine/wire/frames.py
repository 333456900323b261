"""Message types and codecs between the front and an engine process (ZMQ frames of msgpack)."""

from __future__ import annotations

import msgspec

from jaxengine.wire.messages import (
    EngineOutputs,
    EngineReady,
    Siblings,
    UtilityCall,
    UtilityResult,
)

# front -> engine
ADD = b"\x00"  # Siblings
ABORT = b"\x01"
UTILITY = b"\x03"
SHUTDOWN = b"\x04"
ORDER = b"\x05"  # FaultToleranceRequest
START_WAVE = b"\x06"  # WaveNotice, to coupled ranks
GROUP_BROKE = b"\x07"  # int: the port of the coupled group
PING = b"\x08"  # asks the input thread for a PONG

# engine -> front
READY = b"\x10"
OUTPUTS = b"\x11"
RESULT = b"\x12"
FAILED = b"\x13"
STATUS = b"\x14"  # RankStatus
ORDER_RESULT = b"\x15"  # FaultToleranceResult
WAVE = b"\x16"  # WaveNotice, from a coupled rank
PONG = b"\x17"  # a sign of life, as any other message is

# The core an engine process runs, as "module:class". A string, so that neither the front nor the
# import contracts pull JAX in through it.
DEFAULT_CORE = "jaxengine.engine.core:EngineCore"
STUB_CORE = "jaxengine.engine.stub:StubEngineCore"


class EngineFailure(msgspec.Struct):
    """The last words of an engine process. `user_error`: the configuration is at fault."""

    message: str
    traceback: str = ""
    user_error: bool = False


class WaveNotice(msgspec.Struct, array_like=True):
    """Of the coupled group at `port`: a wave began or has ended (see `engine.coupled.waves`)."""

    port: int
    wave: int
    running: bool = True


encode = msgspec.msgpack.Encoder().encode
decode_siblings = msgspec.msgpack.Decoder(Siblings).decode
decode_ids = msgspec.msgpack.Decoder(list[str]).decode
decode_call = msgspec.msgpack.Decoder(UtilityCall).decode
decode_ready = msgspec.msgpack.Decoder(EngineReady).decode
decode_outputs = msgspec.msgpack.Decoder(EngineOutputs).decode
decode_result = msgspec.msgpack.Decoder(UtilityResult).decode
decode_wave = msgspec.msgpack.Decoder(WaveNotice).decode
decode_port = msgspec.msgpack.Decoder(int).decode
decode_failure = msgspec.msgpack.Decoder(EngineFailure).decode
