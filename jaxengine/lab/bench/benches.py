"""What `jaxengine bench` can run: a module of this folder each."""

BENCHES = {
    "throughput": "tokens/s of the engine in this process",
    "latency": "seconds of one batch from start to end",
    "perplexity": "likelihood of texts by type and quantisation",
    "sched": "microseconds of the scheduler a request and step, without a device",
    "spec": "tokens/s and acceptance of speculative decoding, by method and K",
    "offload": "lookups, disk and device copies of the KV tiers, beside the bare machine",
    "serve": "load on a running server, ours or another: TTFT, ITL, tokens/s, goodput",
    "startup": "seconds to the first answer with an empty and a filled compilation cache, by phase",
    "kernels": "each device operation against the roofline of this device",
    "sweep": "a bench over lists of parameters, a result file each, resumable",
    "report": "result files side by side as one HTML page",
}
