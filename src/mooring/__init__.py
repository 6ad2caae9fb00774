"""Mooring: GPU-as-a-Service on the GPU servers you own."""

__version__ = "0.1.0"
