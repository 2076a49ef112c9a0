"""The command line: what users type, and how what was found is printed. Decides nothing about kernels."""
