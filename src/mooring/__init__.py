"""Mooring: GPU-as-a-Service on the GPU servers you own."""
