"""A GPU of Python's: PTX run on the CPU over the memory of CPU tensors.

It runs what the DSL made for a kernel before ptxas, a warp of 32 lanes at a time, so that what a kernel computes and
writes can be held against a reference where there is no GPU. Warps take turns in a drawn order. What is asynchronous
(TMA, bulk stores, WGMMA, tcgen05, cp.async) happens as late as its wait allows, or at a drawn moment before, so a
missing wait or an early release shows as a wrong result. Every global access must lie in memory that was given to the
machine. What it does not see: fences between proxies, times, registers, and anything that ptxas does.

`parse` reads PTX, `code` makes functions of it, and `machine` runs them: warps, CTAs, and the order in which all goes.
What an instruction does is in `arithmetic` where lanes are alone, else in the module that `effects` names, over
`memory`, `tensor_map` and `tensor_cores`. `driver` puts the machine under a library, and `check` holds a kernel against
its reference.
"""
