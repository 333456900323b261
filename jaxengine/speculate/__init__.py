"""Speculative decoding: drafts, their verification, and what trains a drafter."""
