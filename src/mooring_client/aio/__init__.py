"""The asynchronous client. scripts/generate_sync.py makes the package `sync` from it."""
