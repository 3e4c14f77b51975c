"""Latency of decoding: measurements, records and tables."""
