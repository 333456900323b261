"""KV tiers behind the device's: host memory, disk, object store, other engines."""
