"""An operation that another package would bring: row-wise scaling, y[m, n] = factor * x[m, n] * weight[n].

It stands for every operation besides GEMM in tests of what treats all of them alike: that no test of these needs one of
this project's. `install` registers it, its kernels and its tuning as a distribution does, by entry points.
"""
