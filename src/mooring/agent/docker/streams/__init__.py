"""Streams into containers: commands, logs, ports and the main process, each opened in the engine."""
