"""A GPU of Python's: PTX of sm_90a and before, run on the CPU over the memory of CPU tensors.

It runs what the DSL made for a kernel before ptxas, a warp of 32 lanes at a time, so that what a kernel computes and
writes can be held against a reference where there is no GPU. Warps take turns in a drawn order. What is asynchronous
(TMA, bulk stores, WGMMA, cp.async) happens as late as its wait allows, or at a drawn moment before, so a missing wait
or an early release shows as a wrong result. Every global access must lie in memory that was given to the machine.
What it does not see: fences between proxies, times, registers, and anything that ptxas does.

`parse` reads PTX, `arithmetic` has instructions of lanes alone, `tensor_cores` those of WGMMA and mma.sync, `copies`
memory and TMA, `machine` warps, barriers and the order in which all runs, and `driver` puts it under a library.
"""
