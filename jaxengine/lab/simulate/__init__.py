"""The engine in virtual time: its own scheduler, balancer and KV tiers over a model of the device.

`cluster.simulate` runs a workload; a `cost.CostModel` says what a step takes.
"""
