"""The synchronous client: made from `aio` by scripts/generate_sync.py, but for two files."""
