"""CUDA devices over a small driver protocol, and simulated cards for machines without one."""
