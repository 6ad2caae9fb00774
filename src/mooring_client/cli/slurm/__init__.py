"""`mooring slurm`: Slurm's commands."""
