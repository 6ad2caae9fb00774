"""The commands: what they pass on, print and refuse."""
