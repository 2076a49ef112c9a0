"""The CUDA driver: devices, modules, launches and workspaces. Knows nothing of archives."""
